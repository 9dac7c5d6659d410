"""The files that a corpus is made of."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from zoo.checks import ConfigError

BINARY_PROBE_BYTES = 8192
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, kw_only=True)
class Files:
    """Contents by path below the root, in sorted order, without empty files; and how many were skipped as binary."""

    contents: dict[PurePath, bytes]
    num_skipped: int = 0


def stdlib() -> Files:
    """The `*.py` files of the running Python's standard library, without installed packages and test suites.

    Raises ConfigError if this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in _walk("data.source", root, skip=_NOT_LIBRARY) if path.suffix == ".py")
    contents = {path.relative_to(root): path.read_bytes() for path in files}
    if not contents:
        raise ConfigError("data.source", "stdlib", f"there are no *.py files in {root}", hint="use data.source=text")
    return Files(contents={path: content for path, content in contents.items() if content})


def text(path: str) -> Files:
    """The UTF-8 text of a file, or of every file below a folder.

    Of a folder, hidden files and folders are left out, links to folders are not followed, and files with a NUL among
    the first 8 KiB are skipped as binary and counted.

    Raises ConfigError, which names `data.path` and the file, for a path that does not exist or cannot be read, for any
    other file that is not text, and if there is no text at all.
    """
    root = Path(os.path.expanduser(path))
    if not os.path.exists(root):
        problem = "no such file or folder, or out of reach"
        raise ConfigError("data.path", path, problem, hint=f"looked for {root.absolute()}")
    if root.is_dir():
        read = {file.relative_to(root): _read(file, skip_binary=True) for file in _walk("data.path", root)}
    else:
        read = {PurePath(root.name): _read(root, skip_binary=False)}
    contents = {name: content for name, content in read.items() if content}
    num_skipped = sum(content is None for content in read.values())
    if not contents:
        skipped = f" ({num_skipped} binary files were skipped)" if num_skipped else ""
        raise ConfigError("data.path", path, f"holds no text{skipped}")
    return Files(contents=contents, num_skipped=num_skipped)


def _walk(key: str, root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `root` in a fixed order, without those below a folder that is hidden or named in `skip`."""

    def fail(error: OSError):
        raise ConfigError(key, error.filename, f"cannot be read: {error.strerror}") from error

    for folder, folders, names in root.walk(on_error=fail):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (folder / name for name in sorted(names) if not name.startswith("."))


def _read(file: Path, *, skip_binary: bool) -> bytes | None:
    """The text of a file, or None for a binary one that may be skipped. Raises ConfigError for what is not text."""
    if not os.path.isfile(file):
        raise ConfigError("data.path", file, "is not a regular file, or a link that leads nowhere")
    try:
        with file.open("rb") as stream:
            if skip_binary and b"\0" in stream.read(BINARY_PROBE_BYTES):
                return None
            stream.seek(0)
            content = stream.read()
    except OSError as error:
        raise ConfigError("data.path", file, f"cannot be read: {error.strerror}") from error
    _require_text(file, content)
    return content


def _require_text(file: Path, content: bytes) -> None:
    """Raises ConfigError unless `content` is UTF-8 without NUL, which separates documents."""
    if (nul := content.find(0)) >= 0:
        raise ConfigError("data.path", file, f"is not text: byte {nul} is NUL")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}"
        raise ConfigError("data.path", file, problem) from error
