"""The files that a corpus is made of."""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zoo.checks import ConfigError

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_JSONL = (".jsonl", ".ndjson")
PACKED = ".gz"


@dataclass(frozen=True)
class File:
    """A file that is there. `name` is its path below what was asked for, which does not change when that moves."""

    name: str
    path: str
    num_bytes: int
    modified_ns: int

    @property
    def packed(self) -> bool:
        return self.path.endswith(PACKED)


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
    root, key = sysconfig.get_path("stdlib"), "data.source"
    files = _described(key, [each for each in _walk(key, root, skip=_NOT_LIBRARY) if each[0].endswith(".py")])
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
    root = os.path.expanduser(asked)
    if not os.path.lexists(root) and glob.has_magic(root):
        named = _matches(root)
    elif not os.path.exists(root):
        problem = "no such file or folder, or out of reach"
        raise ConfigError(key, asked, problem, hint=f"looked for {os.path.abspath(root)}")
    elif os.path.isdir(root):
        named = list(_walk(key, root))
    else:
        return Found(files=_described(key, [(os.path.basename(root), root)]), key=key, asked=asked, alone=True)
    kept = [each for each in named if source != "jsonl" or kind(each[0]) == "jsonl"]
    return Found(files=_described(key, kept), key=key, asked=asked, num_skipped=len(named) - len(kept))


def kind(path: str) -> str:
    """`jsonl` or `text`, by the ending of a path."""
    return "jsonl" if path.lower().removesuffix(PACKED).endswith(_JSONL) else "text"


def _matches(pattern: str) -> list[tuple[str, str]]:
    """Name and path of the files that a glob matches, named below its part without wildcards."""
    fixed = pattern
    while glob.has_magic(fixed):
        fixed = os.path.dirname(fixed)
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    return [(os.path.relpath(path, fixed or "."), path) for path in paths]


def _walk(key: str, root: str, skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Name and path of the files below `root` in a fixed order, without folders that are hidden or in `skip`."""

    def fail(error: OSError):
        raise ConfigError(key, error.filename, f"cannot be read: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        below = "" if folder == root else os.path.relpath(folder, root)
        yield from ((os.path.join(below, n), os.path.join(folder, n)) for n in sorted(names) if not n.startswith("."))


def _described(key: str, named: Iterable[tuple[str, str]]) -> tuple[File, ...]:
    """The files that are not empty."""
    files = []
    for name, path in named:
        if not os.path.isfile(path):
            raise ConfigError(key, path, "is not a regular file, or a link that leads nowhere")
        status = os.stat(path)
        if status.st_size:
            files.append(File(name, path, status.st_size, status.st_mtime_ns))
    return tuple(files)
