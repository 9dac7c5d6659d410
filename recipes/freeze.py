"""Parameters that training leaves as they are."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import jax
from jaxtyping import PyTree

from zoo.checks import ConfigError
from zoo.paths import flat, path_name


def frozen(patterns: Sequence[str]) -> Callable[[PyTree], PyTree]:
    """The mask of a canonical model that is true for what matches a pattern, or stands below what does.

    Patterns are those of the shell on paths such as `layers.blocks.3.mlp.up_proj.weight`: `embedding`,
    `layers.blocks.[0-3]`, `*.attention`; Hydra's command line wants the last two in quotes. The mask raises ConfigError
    for a pattern without a match, and if nothing is left to train.
    """

    def mask(model: PyTree) -> PyTree:
        names = list(flat(model))
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in names):
                raise ConfigError("train.freeze", pattern, "matches no parameter", hint=_near(names, pattern))
        if all(any(_matches(name, pattern) for pattern in patterns) for name in names):
            raise ConfigError("train.freeze", list(patterns), "leaves nothing to train")
        return jax.tree.map_with_path(
            lambda path, _: any(_matches(path_name(path), pattern) for pattern in patterns), model
        )

    return mask


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _near(names: Sequence[str], pattern: str) -> str:
    """A model has too many paths to list them all."""
    parents = sorted({name.rsplit(".", 1)[0] for name in names})
    close = get_close_matches(pattern, parents, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"such as {', '.join(parents[:3])}"
