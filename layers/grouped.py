"""SwiGLU of blocks of rows, each with the weights of its own expert.

`lax.ragged_dot` is lowered densely on CPU and GPU (it multiplies every row by every expert). Here one scan walks over
the blocks and reads the weights that each needs: no weight is copied, no product is wasted but on padding.

Dims: n blocks, c rows a block, e experts, d rows' size, f hidden size.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from layers.tag import Tag


class Weights(NamedTuple):
    """The projections of all experts."""

    gate: Float[Array, "e d f"]
    up: Float[Array, "e d f"]
    down: Float[Array, "e f d"]


class Names(NamedTuple):
    """The tags of what the backward pass reads."""

    gate: Tag
    up: Tag


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_swiglu(
    rows: Float[Array, "n c d"],
    scales: Float[Array, "n c"],
    weights: Weights,
    experts: Int32[Array, " n"],
    names: Names,
) -> Float[Array, "n c d"]:
    r"""$y = \left(s \cdot \mathrm{silu}(x W_\mathrm{gate}) \cdot (x W_\mathrm{up})\right) W_\mathrm{down}$ a row.

    Block `i` uses expert `experts[i]`; the blocks of an expert must follow one another. The row's scale $s$ stands
    before the last product, so that the backward pass needs no result of the experts, only the tagged products with
    gate and up.
    """
    return _forward(rows, scales, weights, experts)[2]


def _forward(rows, scales, weights, experts):
    def one(_, block):
        rows, scales, expert = block
        w = _of(weights, expert)
        gate, up = rows @ w.gate, rows @ w.up
        return None, (gate, up, (scales[:, None] * (jax.nn.silu(gate) * up)) @ w.down)

    return jax.lax.scan(one, None, (rows, scales, experts))[1]


def _named_forward(rows, scales, weights, experts, names):
    gate, up, out = _forward(rows, scales, weights, experts)
    return out, (rows, scales, weights, experts, names.gate(gate), names.up(up))


def _backward(names, residuals, slope):
    rows, scales, weights, experts, gate, up = residuals

    def one(carry, block):
        rows, scales, gate, up, slope, expert, begins = block
        w, (sums, d_weights) = _of(weights, expert), carry
        silu, pull_silu = jax.vjp(jax.nn.silu, gate)
        hidden = silu * up
        d_scaled = slope @ w.down.T
        d_hidden = scales[:, None] * d_scaled
        (d_gate,), d_up = pull_silu(d_hidden * up), d_hidden * silu
        parts = Weights(_outer(rows, d_gate), _outer(rows, d_up), _outer(scales[:, None] * hidden, slope))
        sums = jax.tree.map(lambda total, part: part + jnp.where(begins, 0.0, total), sums, parts)
        d_weights = jax.tree.map(
            lambda done, total: jax.lax.dynamic_update_index_in_dim(
                done, total.astype(done.dtype), expert, axis=0, allow_negative_indices=False
            ),
            d_weights,
            sums,
        )
        d_scales = jnp.einsum("cf,cf->c", d_scaled, hidden, preferred_element_type=jnp.float32)
        return (sums, d_weights), (d_gate @ w.gate.T + d_up @ w.up.T, d_scales.astype(scales.dtype))

    # The sum over an expert's blocks is float32; experts without rows keep gradients of exactly zero.
    sums = jax.tree.map(lambda weight: jnp.zeros(weight.shape[1:], jnp.float32), weights)
    begins = jnp.concatenate([jnp.ones(1, bool), experts[1:] != experts[:-1]])
    blocks = (rows, scales, gate, up, slope, experts, begins)
    (_, d_weights), (d_rows, d_scales) = jax.lax.scan(one, (sums, jax.tree.map(jnp.zeros_like, weights)), blocks)
    return d_rows, d_scales, d_weights, None


grouped_swiglu.defvjp(_named_forward, _backward)


def _of(weights: Weights, expert) -> Weights:
    return jax.tree.map(
        lambda weight: jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False, allow_negative_indices=False),
        weights,
    )


def _outer(a, b):
    return jnp.einsum("cd,cf->df", a, b, preferred_element_type=jnp.float32)
