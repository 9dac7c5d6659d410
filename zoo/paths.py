"""Leaves of a canonical model by path: `layers.blocks.3.mlp.up_proj.weight`."""

from typing import Any

import jax
from jaxtyping import PyTree


def path_name(path: Any) -> str:
    """The name of a path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def flat(tree: PyTree) -> dict[str, Any]:
    """The leaves by the names of their paths, in order."""
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
