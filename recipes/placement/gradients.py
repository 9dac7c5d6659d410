"""Gradients on the place that `placement.state` asks for, wherever the parameters are."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from layers.nodes import replaced
from recipes.placement.hosted import fetched, layer_of, move, on_host, place_of, with_layer
from recipes.placement.segments import is_run
from recipes.placement.settle import places_in


def landings(params: PyTree) -> PyTree:
    """What to differentiate by: a parameter that is on the device as its gradient is; else zeros where that is to be.

    The zeros are never read: see `arrived`.
    """

    def landing(leaf: Array, place: str) -> Array:
        return leaf if _at_home(leaf, place) else move(jnp.zeros(leaf.shape, leaf.dtype), place)

    return jax.tree.map(landing, params, places_in(params, "gradients", params))


def landing_on_host(params: PyTree, placed: PyTree) -> list[Any]:
    """The parameters whose gradients the placement of the placed model wants on the host."""
    pairs = zip(*map(jax.tree.leaves, (params, places_in(params, "gradients", placed))), strict=True)
    return [leaf for leaf, place in pairs if place == "host"]


def arrived(landing: PyTree, params: PyTree, rest: PyTree) -> PyTree:
    """The model to compute with, whose derivative by `landing` is the gradient of `params`.

    `rest` is what is not trained. What stands outside of segments is on the device; segments fetch layer by layer.
    """
    wanted = iter(jax.tree.leaves(places_in(params, "gradients", params)))

    def source(leaf: Any) -> Any:
        return None if leaf is None or _at_home(leaf, next(wanted)) else leaf

    def change(landed: Any, own: Any) -> Any:
        if not is_run(landed):
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
            return with_layer(total, add(layer_of(total, layer), layer_of(part, layer)), layer), None

        return jax.lax.scan(visit, total, jnp.arange(total.shape[0], dtype=jnp.int32))[0]

    def change(total: Any, part: Any) -> Any:
        stacked = is_run(total)
        return jax.tree.map(lambda a, b: add_layers(a, b) if stacked and on_host(a) else add(a, b), total, part)

    return jax.tree.map(change, sums, parts, is_leaf=is_run)


def _at_home(leaf: Array, place: str) -> bool:
    return place_of(leaf) == place == "device"


def _with_gaps(tree: PyTree) -> Iterator[Any]:
    yield from jax.tree.leaves(tree, is_leaf=lambda node: node is None)


def _is_run_or_none(node: object) -> bool:
    return node is None or is_run(node)
