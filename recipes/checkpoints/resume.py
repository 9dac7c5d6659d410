"""Which checkpoint a run goes on from, whether it may, and what is other than it was."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml

from recipes.checkpoints import folder as folders
from recipes.checkpoints.restore import restore
from recipes.config import Config
from recipes.setup import Setup
from recipes.step.state import TrainState
from zoo import registry
from zoo.checkpoint import model_config, read_config
from zoo.checks import ConfigError, flat_fields
from zoo.folders import Folder, Remote, takes_files

# What a run does with the same numbers, whatever these fields of `train` say; those of other sections all count.
_NO_NUMBERS = (
    "steps allow_cast checkpoint_dir checkpoint_every distributed init_from keep_every keep_last max_bad_steps resume"
    " sample_tokens spike_factor validate_every validation_batches"
).split()


class Found(NamedTuple):
    """The checkpoint that a run goes on from, and what its configuration said."""

    folder: Folder
    step: int
    config: Mapping[str, Any]
    data: str | None


def find(config: Config) -> Found | None:
    """The last checkpoint of the run, None if it is to begin anew.

    Raises ConfigError if there must be one and is none, or it is unreadable or of another model.
    """
    root, resume, key = folders.root(config), config.train.resume, folders.key(config)
    if isinstance(root, Path) and root.exists() and not takes_files(root):
        raise ConfigError(key, root.parent if key == "run.dir" else root, f"{root} is not a folder that can be written")
    try:
        steps = folders.steps(root)
    except OSError as error:
        raise ConfigError(key, root, f"cannot be read: {error.strerror}") from error
    _agree(steps, key)
    if resume == "never":
        if steps and isinstance(root, Remote):
            problem = f"{root} holds checkpoints up to step {steps[-1]}, and a store cannot set them aside"
            raise ConfigError("train.resume", resume, problem, hint=f"choose another {key}")
        return None
    if not steps:
        if resume == "must":
            raise ConfigError("train.resume", "must", f"{root} holds no checkpoint")
        return None
    folder = root / str(steps[-1])
    try:
        fields = _read(folder)
    except ConfigError as error:
        raise _offering(error, folder) from error
    _require_model(folder, fields, config)
    return Found(folder, steps[-1], fields["training"]["config"], fields["training"].get("data"))


def resumed(found: Found, setup: Setup) -> TrainState:
    """The state of a checkpoint. Raises ConfigError naming what does not fit or is damaged, and the one before it."""
    try:
        state = restore(found.folder, setup.abstract_state(), allow_cast=setup.config.train.allow_cast)
        if int(state.step) != found.step:
            raise ConfigError("checkpoint", found.folder, f"holds step {int(state.step)}")
        return state
    except ConfigError as error:
        raise _offering(error, found.folder) from error


def describe(found: Found, config: Config, resolved_config: str, data: str) -> str:
    """A line about the run that goes on, and one about what is other than it was, if anything is."""
    lines = [f"goes on from {found.folder}, step {found.step} of {config.train.steps}"]
    changed = differences(found.config, yaml.safe_load(resolved_config))
    if changed:
        lines.append(f"other than before: {', '.join(changed)}")
    if found.data not in (None, data):
        lines.append("the documents are not those of before: the run sees other sequences from here on")
    was = _section(found.config, "train").get("steps")
    if was != config.train.steps and config.optimizer.schedule != "constant":
        lines.append(f"train.steps was {was}: the learning rate now follows the new number, from here on")
    return "\n".join(lines)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two configurations and changes the numbers of a run: `data.seed=1 (was 0)`."""
    changed = []
    for section in ("model", "optimizer", "data", "train"):
        old, new = flat_fields(_section(before, section)), flat_fields(_section(now, section))
        names = [
            name for name in [*new, *(n for n in old if n not in new)] if section != "train" or name not in _NO_NUMBERS
        ]
        changed += [
            f"{section}.{name}={new.get(name)} (was {old.get(name)})"
            for name in names
            if old.get(name) != new.get(name)
        ]
    return changed


def _read(folder: Folder) -> dict[str, Any]:
    """`config.yaml` of a checkpoint of training; raises ConfigError if it is none of this version."""
    fields = read_config(folder)
    training = fields.get("training")
    found = training if isinstance(training, dict) else {}
    if found.get("version") != folders.VERSION or not isinstance(found.get("config"), dict):
        problem = f"has version {found.get('version')} of training, this one reads {folders.VERSION}"
        raise ConfigError("checkpoint", folder, problem)
    return fields


def _require_model(folder: Folder, fields: Mapping[str, Any], config: Config) -> None:
    there, here = model_config(folder, fields), config.model
    if type(there) is not type(here):
        problem = f"is of a {type(there).__name__}, model is a {type(here).__name__}"
        raise ConfigError("checkpoint", folder, problem, hint=f"choose another {folders.key(config)}")
    differing = registry.differences(there, here).items()
    if differing:
        problem = "is of another model: " + ", ".join(f"model.{k}={old}, here {new}" for k, (old, new) in differing)
        raise ConfigError("checkpoint", folder, problem, hint=f"choose another {folders.key(config)}, or its values")


def _offering(error: ConfigError, folder: Folder) -> ConfigError:
    """The error with a way to the checkpoint before, if there is one."""
    steps = [step for step in folders.steps(folder.parent) if step < int(folder.name)]
    if not steps:
        return error
    return error.with_hint(f"to go on from step {steps[-1]} instead: {folders.to_skip(folder)}")


def _agree(steps: list[int], key: str) -> None:
    """Raises ConfigError unless all processes see the same checkpoints."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        last = multihost_utils.process_allgather(np.asarray([steps[-1] if steps else -1]))
        if (last != last[0]).any():
            raise ConfigError(key, last.ravel().tolist(), "processes see different checkpoints: share the folder")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
