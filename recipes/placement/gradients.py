"""Gradients on the place that `placement.state` asks for, wherever the parameters are."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from layers.nodes import replaced
from recipes.placement.hosted import fetched, move, on_host, place_of
from recipes.placement.segments import Run
from recipes.placement.settle import places_in


def landings(params: PyTree) -> PyTree:
    """What to differentiate by: a parameter that is on the device as its gradient is; else zeros where that is to be.

    The zeros are never read: see `arrived`.
    """
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(leaves, places_in(params, "gradients", params), strict=True)
    landed = [
        leaf if _at_home(leaf, place) else move(jnp.zeros(leaf.shape, leaf.dtype), place) for leaf, place in pairs
    ]
    return jax.tree.unflatten(structure, landed)


def arrived(landing: PyTree, params: PyTree, rest: PyTree) -> PyTree:
    """The model to compute with, whose derivative by `landing` is the gradient of `params`.

    `rest` is what is not trained. What stands outside of segments is on the device; segments fetch layer by layer.
    """
    wanted = iter(places_in(params, "gradients", params))

    def source(leaf: Any) -> Any:
        return None if leaf is None or _at_home(leaf, next(wanted)) else leaf

    def change(landed: Any, own: Any) -> Any:
        if not isinstance(landed, Run):
            found = source(own)
            return move(landed, "device") if found is None else fetched(found, landed)
        sources = tuple(tuple(source(leaf) for leaf in _with_gaps(block)) for block in own.blocks)
        return replaced(landed, sources=sources) if any(map(jax.tree.leaves, sources)) else landed

    return jax.tree.map(change, eqx.combine(landing, rest), params, is_leaf=_is_run_or_none)


def added(sums: PyTree, parts: PyTree) -> PyTree:
    """The gradients of one more micro-batch on their sums; stacks on the host layer by layer."""

    def add(total: Array, part: Array) -> Array:
        # A barrier: XLA would scatter the gradient of a tied embedding's rows right into the sum, in an order that the
        # sum on the host does not have.
        part = jax.lax.optimization_barrier(move(part, "device"))
        return move(move(total, "device") + part.astype(total.dtype), place_of(total))

    def add_layers(total: Array, part: Array) -> Array:
        def visit(total: Array, layer: Array) -> tuple[Array, None]:
            new = add(*(jax.lax.dynamic_slice_in_dim(x, layer, 1) for x in (total, part)))
            return jax.lax.dynamic_update_slice_in_dim(total, new, layer, 0), None

        return jax.lax.scan(visit, total, jnp.arange(total.shape[0], dtype=jnp.int32))[0]

    def change(total: Any, part: Any) -> Any:
        stacked = isinstance(total, Run)
        return jax.tree.map(lambda a, b: add_layers(a, b) if stacked and on_host(a) else add(a, b), total, part)

    return jax.tree.map(change, sums, parts, is_leaf=lambda node: isinstance(node, Run))


def _at_home(leaf: Array, place: str) -> bool:
    return place_of(leaf) == place == "device"


def _with_gaps(tree: PyTree) -> Iterator[Any]:
    yield from jax.tree.leaves(tree, is_leaf=lambda node: node is None)


def _is_run_or_none(node: object) -> bool:
    return node is None or isinstance(node, Run)
