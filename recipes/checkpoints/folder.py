"""The folder of a run's checkpoints: one folder a step, there once it is complete. Free of jax."""

import os
import shutil
from pathlib import Path

NAME = "checkpoints"  # below `run.dir`
VERSION = 1  # of what a checkpoint of training holds besides weights
_UNFINISHED = ".unfinished"


def steps(root: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdecimal() and entry.is_dir())


def unfinished(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is written; no reader takes it for one."""
    return root / f"{step}{_UNFINISHED}"


def commit(root: Path, step: int) -> Path:
    """Makes what was written the checkpoint of its step, at once; one that was there already gives way."""
    folder = root / str(step)
    if folder.exists():
        _discard(folder)
    os.replace(unfinished(root, step), folder)
    _sync(root)
    return folder


def clean(root: Path) -> None:
    """Removes what a run that died left half-written or half-removed."""
    for entry in root.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(entry)


def prune(root: Path, keep_last: int, keep_every: int) -> None:
    """Removes all but the last `keep_last` and those whose step is a multiple of `keep_every` (0: none)."""
    for step in steps(root)[:-keep_last]:
        if not (keep_every and step % keep_every == 0):
            _discard(root / str(step))


def set_aside(root: Path) -> Path:
    """Renames the folder so that another run can begin in its place."""
    number = next(n for n in range(1, 10**6) if not root.with_name(f"{root.name}.{n}").exists())
    return root.rename(root.with_name(f"{root.name}.{number}"))


def _discard(folder: Path) -> None:
    """Removes a checkpoint so that it is never half there."""
    doomed = folder.with_name(f"{folder.name}.old{_UNFINISHED}")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def _sync(folder: Path) -> None:
    """Has the disk hold what the folder lists."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
