"""`zoo-train`: trains a model under a placement."""

import importlib.util

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
    corpus = load(config.data, config.model.vocab_size)

    from recipes.cli.runtime import prepare_jax
    from recipes.loop import run

    prepare_jax(config.run)
    return run(config, corpus, OmegaConf.to_yaml(tree, resolve=True))


def _require_extra() -> None:
    for package in ("rich", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                package, "missing", "zoo-train needs the extra [train]", hint="pip install 'offload-zoo[train]'"
            )


if __name__ == "__main__":
    main()
