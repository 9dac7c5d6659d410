"""Which cells of a placement have an effect: the tagged arrays that a layer's backward pass really reads."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from layers.stack import Stack
from layers.tag import tags
from recipes.placement.segments import map_stacks, place_stack, structure
from recipes.verify.jaxpr import saved
from zoo.base import Decoder

DEFAULT_EXAMPLE = (jax.ShapeDtypeStruct((1, 8), jnp.int32),)


def savable(model: PyTree, example: Sequence[Any] = DEFAULT_EXAMPLE) -> list[dict[str, int]]:
    """For each layer, the tags that can be saved and the bytes of each, for the model called as `model(*example)`.

    Traces the gradient once with every tag on the host and few layers of each structure, and looks at what the backward
    pass is handed. Nothing is compiled or computed.
    """
    blocks = [block for stack in stacks(model) for block in stack.blocks]
    kinds: list[Any] = []
    for block in blocks:
        if structure(block) not in kinds:
            kinds.append(structure(block))

    def sample(stack: Stack) -> Any:
        """One run for each structure, of a length of its own, by which its residuals are known again."""
        firsts = {kinds.index(structure(block)): block for block in reversed(stack.blocks)}
        repeated = [block for kind, block in firsts.items() for _ in range(kind + 1)]
        rows = [({tag.name: "host" for tag in tags(block)}, ()) for block in repeated]
        return place_stack(Stack(tuple(repeated)), rows)

    first: dict[int, int] = {}  # the scan that shows a structure: two stacks may hold the same one
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model)
    program = jax.make_jaxpr(eqx.filter_grad(_total))(map_stacks(sample, abstract), *example)
    sizes: list[dict[str, int]] = [{} for _ in kinds]
    for residual in saved(program):
        kind = residual.layers - 1
        if first.setdefault(kind, residual.scan) == residual.scan:
            sizes[kind][residual.tag] = sizes[kind].get(residual.tag, 0) + residual.layer_bytes
    return [sizes[kinds.index(structure(block))] for block in blocks]


def stacks(model: PyTree) -> list[Stack]:
    """The canonical stacks of a model, whose layers are numbered one after another."""
    leaves = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, Stack))
    return [leaf for leaf in leaves if isinstance(leaf, Stack)]


def _total(model: PyTree, *args: Any) -> jax.Array:
    """A scalar that depends on every float output of the model."""
    call = model.forward if isinstance(model, Decoder) else model  # which computes `mtp` too
    outputs = [leaf for leaf in jax.tree.leaves(call(*args)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.sum(jnp.stack([jnp.sum(leaf.astype(jnp.float32)) for leaf in outputs]))
