"""A command that goes on with a run needs to say only what is other than before."""

import shlex
from pathlib import Path

from recipes.checkpoints import folder as folders

_HEAD = "# zoo-train "
_OF_ONE_START = ("run.dir", "train.resume")


def heading(overrides: list[str]) -> str:
    """The first line of a run's `config.yaml`: the overrides that its configuration comes from."""
    return _HEAD + shlex.join(word for word in overrides if _key(word) not in _OF_ONE_START) + "\n"


def as_before(overrides: list[str]) -> list[str]:
    """The overrides, after those that the run of `run.dir` was begun with if it has checkpoints to go on from."""
    given = _values(overrides)
    folder = Path(given.get("run.dir") or "")
    anew = "run.dir" not in given or given.get("train.resume") == "never"
    if anew or any(word.startswith("-") for word in overrides):
        return overrides
    try:
        head, _, _ = (folder / "config.yaml").read_text().partition("\n")
    except (OSError, ValueError):
        return overrides
    before = shlex.split(head.removeprefix(_HEAD)) if head.startswith(_HEAD) else []
    if not _has_checkpoints(folder, (_values(before) | given).get("train.checkpoint_dir", "null")):
        return overrides
    added = [word for word in before if _key(word) not in given]
    if added:
        print(f"as before: {shlex.join(added)}")
    return [*added, *overrides]


def _has_checkpoints(folder: Path, elsewhere: str) -> bool:
    """Whether a run has some, in its own folder or in that of `train.checkpoint_dir`; a store is not asked here."""
    if elsewhere in ("", "null"):
        return bool(folders.steps(folder / folders.NAME))
    return "://" in elsewhere or bool(folders.steps(Path(elsewhere).expanduser()))


def _values(overrides: list[str]) -> dict[str, str]:
    return {_key(word): word.partition("=")[2] for word in overrides}


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
