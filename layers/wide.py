"""Weights whose gradients are float32 sums over tokens, and on a mesh over devices, and are rounded once after.

Otherwise each device rounds what its own tokens add to the weight's dtype first.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from layers.nodes import map_nodes, replaced


@runtime_checkable
class Weighted(Protocol):
    """A module with weights, whose gradients are summed wide if `wide`, a static field."""

    wide: bool


def widened(tree: PyTree) -> PyTree:
    """The tree with the gradients of all its weights summed wide; values are the same."""
    return map_nodes(lambda node: replaced(node, wide=True), tree, Weighted)


@jax.custom_vjp
def product(x: Float[Array, "*batch in_dim"], weight: Float[Array, "in_dim out_dim"]) -> Float[Array, "*batch out_dim"]:
    """$x W$."""
    return x @ weight


def _product(x, weight):
    return product(x, weight), (x, weight)


def _product_slopes(residuals, slope):
    x, weight = residuals
    batch = tuple(range(x.ndim - 1))
    sums = jax.lax.dot_general(x, slope, ((batch, batch), ((), ())), preferred_element_type=jnp.float32)
    return slope @ weight.T, sums.astype(weight.dtype)


product.defvjp(_product, _product_slopes)


@jax.custom_vjp
def rows(weight: Float[Array, "vocab dim"], tokens: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
    """$W_t$ for each token $t$."""
    return jnp.take(weight, tokens, axis=0)


def _rows(weight, tokens):
    return rows(weight, tokens), (weight, tokens)


def _rows_slopes(residuals, slope):
    weight, tokens = residuals
    sums = jnp.zeros(weight.shape, jnp.float32).at[tokens].add(slope.astype(jnp.float32))
    return sums.astype(weight.dtype), None


rows.defvjp(_rows, _rows_slopes)


@jax.custom_vjp
def scaled(x: Float[Array, "*batch dim"], weight: Float[Array, " dim"]) -> Float[Array, "*batch dim"]:
    r"""$w \cdot x$ over the last dim."""
    return x * jnp.broadcast_to(weight, x.shape)


def _scaled(x, weight):
    return scaled(x, weight), (x, weight)


def _scaled_slopes(residuals, slope):
    x, weight = residuals
    sums = jnp.sum(slope.astype(jnp.float32) * x.astype(jnp.float32), axis=tuple(range(x.ndim - 1)))
    return slope * jnp.broadcast_to(weight, x.shape), sums.astype(weight.dtype)


scaled.defvjp(_scaled, _scaled_slopes)
