"""The folder of a run's checkpoints: one folder a step, there once it is complete. Free of jax.

A local one is written beside its place and renamed. In an object store it is written in its place; what says that it is
complete, `config.yaml`, comes last and goes first.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from recipes.config import Config
from zoo.folders import BESIDE, CONFIG, WEIGHTS, Folder, Remote, at

NAME = "checkpoints"  # below `run.dir`
TRAINING = "training"  # the folder of what a checkpoint holds besides weights
VERSION = 1  # of that
_UNFINISHED = ".unfinished"
_PARTS = (WEIGHTS, TRAINING, BESIDE, CONFIG)  # of a checkpoint


def key(config: Config) -> str:
    """The option that says where a run's checkpoints are."""
    return "run.dir" if config.train.checkpoint_dir is None else "train.checkpoint_dir"


def root(config: Config) -> Folder:
    """Where a run's checkpoints are."""
    asked = config.train.checkpoint_dir
    return Path(config.run.dir) / NAME if asked is None else at(asked, key(config))


def steps(root: Folder) -> list[int]:
    """The steps of the complete checkpoints, ascending."""
    if isinstance(root, Remote):
        return sorted(int(name) for name, complete in _folders(root).items() if complete)
    if not root.is_dir():
        return []
    return sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdecimal() and entry.is_dir())


def begin(root: Folder, step: int) -> Folder:
    """An empty place for the checkpoint of a step to be written; no reader takes it for one until it is committed.

    Raises OSError if something else is in that place of a store.
    """
    place = unfinished(root, step)
    if isinstance(place, Remote):
        _clear(place)
    else:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    return place


def unfinished(root: Folder, step: int) -> Folder:
    """Where the checkpoint of a step is written."""
    return root / str(step) if isinstance(root, Remote) else root / f"{step}{_UNFINISHED}"


def commit(root: Folder, step: int) -> Folder:
    """Makes what was written the checkpoint of its step, at once; one that was there already gives way.

    In a store it is that already, since its `config.yaml` was written.
    """
    place, folder = unfinished(root, step), root / str(step)
    if isinstance(place, Path) and isinstance(folder, Path):
        if folder.exists():
            _discard(folder)
        os.replace(place, folder)
        _sync(folder.parent)
    return folder


def abandon(root: Folder, step: int) -> None:
    """Removes what was written of a checkpoint that will not be complete, as far as that can be done."""
    place = unfinished(root, step)
    if isinstance(place, Path):
        shutil.rmtree(place, ignore_errors=True)
        return
    with suppress(OSError):
        if not (place / CONFIG).exists():
            _clear(place)


def clean(root: Folder) -> None:
    """Removes what a run that died left half-written or half-removed."""
    if isinstance(root, Remote):
        for name in (name for name, complete in _folders(root).items() if not complete):
            (root / name).remove()
        return
    for entry in root.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(entry)


def prune(root: Folder, keep_last: int, keep_every: int) -> None:
    """Removes all but the last `keep_last` and those whose step is a multiple of `keep_every` (0: none)."""
    for step in steps(root)[:-keep_last]:
        if not (keep_every and step % keep_every == 0):
            _discard(root / str(step))


def set_aside(root: Path) -> Path:
    """Renames the folder so that another run can begin in its place."""
    number = next(n for n in range(1, 10**6) if not root.with_name(f"{root.name}.{n}").exists())
    return root.rename(root.with_name(f"{root.name}.{number}"))


def to_skip(folder: Folder) -> str:
    """How a person makes readers pass over a checkpoint."""
    if isinstance(folder, Remote):
        return f"delete {folder / CONFIG}; the rest of it goes at the next start"
    return f"mv {folder} {folder}.set-aside"


def _folders(root: Remote) -> dict[str, bool]:
    """The folders of steps in a store, and whether each is complete; none that holds anything else."""
    found: dict[str, list[list[str]]] = {}
    for first, *below in (name.split("/") for name in root.names()):
        if below and first.isdecimal():
            found.setdefault(first, []).append(below)
    return {step: [CONFIG] in names for step, names in found.items() if _is_own(names)}


def _clear(place: Remote) -> None:
    if not _is_own(name.split("/") for name in place.names()):
        raise FileExistsError(errno.EEXIST, "holds what is of no checkpoint", str(place))
    place.remove()


def _is_own(names: Iterable[list[str]]) -> bool:
    return all(first in _PARTS for first, *_ in names)


def _discard(folder: Folder) -> None:
    """Removes a checkpoint so that it is never half there."""
    if isinstance(folder, Remote):
        folder.remove()
        return
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
