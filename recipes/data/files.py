"""The files that a corpus is made of."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from zoo.checks import ConfigError

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_JSONL = (".jsonl", ".ndjson")
PACKED = ".gz"


@dataclass(frozen=True)
class File:
    """A file that is there. `name` is its path below what was asked for, which does not change when that moves."""

    name: PurePath
    path: Path
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """Files in sorted order, without empty ones.

    - `key`, `asked`: the setting that named them.
    - `alone`: one file was named, rather than a folder or a glob, so it is an error if it is binary.
    - `num_skipped`: files of another kind that lie in the folder.
    """

    files: tuple[File, ...]
    key: str
    asked: str
    alone: bool = False
    num_skipped: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def stdlib() -> Found:
    """The `*.py` files of the running Python's standard library, without installed packages and test suites.

    Raises ConfigError if this Python comes without its sources.
    """
    root, key = Path(sysconfig.get_path("stdlib")), "data.source"
    paths = [path for path in _walk(key, root, skip=_NOT_LIBRARY) if path.suffix == ".py"]
    files = _described(key, [(path.relative_to(root), path) for path in paths])
    if not files:
        raise ConfigError(key, "stdlib", f"there are no *.py files in {root}", hint="use data.source=text")
    return Found(files=files, key=key, asked="stdlib")


def find(key: str, asked: str, source: str) -> Found:
    """The files of a path: itself, all below a folder, or what a glob matches (`**` reaches through folders).

    Of a folder, hidden files and folders are left out and links to folders are not followed; of one read as `jsonl`
    only files ending in `.jsonl` or `.ndjson`, plain or `.gz`, count.

    Raises ConfigError, which names `key` and the file, for a path that does not exist or cannot be read, and if there
    is nothing in it.
    """
    root = Path(os.path.expanduser(asked))
    if not os.path.lexists(root) and glob.has_magic(str(root)):
        named = _matches(root)
    elif not os.path.exists(root):
        problem = "no such file or folder, or out of reach"
        raise ConfigError(key, asked, problem, hint=f"looked for {root.absolute()}")
    elif root.is_dir():
        named = [(path.relative_to(root), path) for path in _walk(key, root)]
    else:
        return Found(files=_described(key, [(PurePath(root.name), root)]), key=key, asked=asked, alone=True)
    kept = [(name, path) for name, path in named if source != "jsonl" or _ending(path) in _JSONL]
    return Found(files=_described(key, kept), key=key, asked=asked, num_skipped=len(named) - len(kept))


def kind(path: str) -> str:
    """`jsonl` or `text`, by the ending of a path."""
    return "jsonl" if _ending(Path(path)) in _JSONL else "text"


def _ending(path: Path) -> str:
    return Path(path.name.removesuffix(PACKED)).suffix.lower()


def _matches(pattern: Path) -> list[tuple[PurePath, Path]]:
    """The files that a glob matches, named below its part without wildcards."""
    fixed = Path(*(part for part, wild in zip(pattern.parts, _wild(pattern), strict=True) if not wild))
    paths = sorted(Path(path) for path in glob.glob(str(pattern), recursive=True) if not os.path.isdir(path))
    return [(path.relative_to(fixed), path) for path in paths]


def _wild(pattern: Path) -> Iterator[bool]:
    """Whether each part comes at or after the first with a wildcard."""
    seen = False
    for part in pattern.parts:
        seen = seen or glob.has_magic(part)
        yield seen


def _walk(key: str, root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `root` in a fixed order, without those below a folder that is hidden or named in `skip`."""

    def fail(error: OSError):
        raise ConfigError(key, error.filename, f"cannot be read: {error.strerror}") from error

    for folder, folders, names in root.walk(on_error=fail):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (folder / name for name in sorted(names) if not name.startswith("."))


def _described(key: str, named: list[tuple[PurePath, Path]]) -> tuple[File, ...]:
    files = []
    for name, path in named:
        if not os.path.isfile(path):
            raise ConfigError(key, path, "is not a regular file, or a link that leads nowhere")
        status = path.stat()
        if status.st_size:
            files.append(File(name, path, status.st_size, status.st_mtime_ns))
    return tuple(files)
