"""Logical axes: names for the dims of parameters, so that a recipe can say which of them a mesh shards.

A module declares them as `axes`, a class variable or a property:

    weight: Float[Array, "vocab dim"]
    axes: ClassVar[Axes] = {"weight": ("vocab", "embed")}

| name | dim |
|---|---|
| `vocab`, `embed` | tokens of the vocabulary; the residual stream |
| `heads`, `kv_heads` | all query heads, or key-value heads, with their dims |
| `rank` | latents of MLA, where a weight reads them |
| `mlp` | hidden dim of a feed-forward layer, an expert's too |
| `expert`, `expert_embed` | routed experts; the residual stream as their weights see it |
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

Dims = tuple[str | None, ...]  # a name for each dim, None for one that is never sharded
Axes = Mapping[str, Dims]


def logical_axes(tree: PyTree) -> list[Dims]:
    """The names of each array's dims, in the order of `jax.tree.leaves`; `()` where its module declares none.

    An array may have more dims than names: those of a stack, in front.
    """
    return [dims for node in jax.tree.leaves(tree, is_leaf=_declares) for dims in _dims(node)]


def _dims(node: Any) -> list[Dims]:
    if not _declares(node):
        return [()]
    return [node.axes.get(path[0].name, ()) if len(path) == 1 else () for path, _ in jax.tree.leaves_with_path(node)]


def _declares(node: object) -> bool:
    return isinstance(node, eqx.Module) and hasattr(type(node), "axes")
