"""`zoo-train`: trains a model under a placement."""

import importlib.util
import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipes.cli.launch import launch
from recipes.schema import read
from zoo.checks import ConfigError


def main() -> None:
    """Entry point of `zoo-train`."""
    launch("zoo-train", train)


def train(tree: DictConfig) -> int:
    """Checks the configuration and the data, then starts the run. Imports jax only once both are good."""
    from recipes.data.source import load

    config = read(tree)
    _require_extra()
    _require_folder(config.run.dir)
    corpus = load(config.data, config.model.vocab_size)

    from recipes.cli.runtime import prepare_jax
    from recipes.loop import run

    prepare_jax(config.run)
    return run(config, corpus, OmegaConf.to_yaml(tree, resolve=True))


def _require_folder(folder: str) -> None:
    """Raises ConfigError unless `run.dir` is a folder that can be written, or can be made in one."""
    path = Path(folder).absolute()
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not (os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)):
        raise ConfigError("run.dir", folder, f"cannot be made: {nearest} is not a folder that can be written")


def _require_extra() -> None:
    for package in ("rich", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                package, "missing", "zoo-train needs the extra [train]", hint="pip install 'offload-zoo[train]'"
            )


if __name__ == "__main__":
    main()
