"""`zoo-train`: trains a model under a placement."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from recipes.checkpoints import folder as checkpoints
from recipes.cli.again import as_before, heading
from recipes.cli.launch import launch
from recipes.cli.runtime import prepare_jax, require_extra
from recipes.processes import launcher, run_joined
from recipes.schema import read
from zoo.checks import ConfigError
from zoo.folders import Folder, Remote, takes_files


def main() -> None:
    """Entry point of `zoo-train`."""
    sys.argv[1:] = as_before(sys.argv[1:])  # Hydra reads them there
    launch("zoo-train", train)


def train(tree: DictConfig) -> int:
    """Checks the configuration and the data, then starts the run. Imports jax only once both are good."""
    from recipes.data.source import load, with_tokenizer_of

    config = read(tree)
    require_extra("zoo-train", "train", "rich", "matplotlib", "orbax", "tensorstore")
    if config.train.init_from is not None:
        require_extra("train.init_from", "hf", "safetensors")
    if config.data.needs:
        require_extra("data", "train", *config.data.needs)
    _require_folder("run.dir", Path(config.run.dir))
    if config.train.checkpoint_dir is not None:
        _require_folder("train.checkpoint_dir", checkpoints.root(config))
    corpus = load(with_tokenizer_of(config.train.init_from, config.data), config.model.vocab_size)

    prepare_jax(config.run.compile_cache)
    others = launcher(config.train.distributed)
    resolved = heading(HydraConfig.get().overrides.task) + OmegaConf.to_yaml(tree, resolve=True)
    job = partial(_run, config, corpus, resolved)
    return job() if others is None else run_joined("zoo-train", others, config.mesh.num_devices, job)


def _run(*args: Any) -> int:
    from recipes.loop import run  # imports jax

    return run(*args)


def _require_folder(key: str, folder: Folder) -> None:
    """Raises ConfigError unless this is a folder that can be written, or can be made in one."""
    if isinstance(folder, Remote):
        try:
            folder.require_writable()
        except OSError as error:
            hint = f"credentials come from {folder.credentials}"
            raise ConfigError(key, folder, f"cannot be written: {error.strerror}", hint=hint) from error
        return
    path = folder.absolute()
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not takes_files(nearest):
        raise ConfigError(key, folder, f"cannot be made: {nearest} is not a folder that can be written")


if __name__ == "__main__":
    main()
