"""Matrix product of blocks of rows, each with the weight of its own expert.

`lax.ragged_dot` is lowered densely on CPU and GPU (it multiplies every row by every expert). Here one scan walks over
the blocks and reads the one weight that each needs: no weight is copied, no product is wasted but on padding.

Dims: n blocks, c rows a block, e experts, d rows' size in, f rows' size out.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


@jax.custom_vjp
def grouped_matmul(
    rows: Float[Array, "n c d"], weight: Float[Array, "e d f"], experts: Int32[Array, " n"]
) -> Float[Array, "n c f"]:
    """`rows[i] @ weight[experts[i]]` for each block `i`."""

    def product(_, block):
        rows, expert = block
        return None, rows @ jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False)

    return jax.lax.scan(product, None, (rows, experts))[1]


def _forward(rows, weight, experts):
    return grouped_matmul(rows, weight, experts), (rows, weight, experts)


def _backward(residuals, slope):
    rows, weight, experts = residuals

    def gradients(d_weight, block):
        rows, slope, expert = block
        d_rows = slope @ jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False).T
        part = jnp.einsum("cd,cf->df", rows, slope, preferred_element_type=jnp.float32)
        part = part + jax.lax.dynamic_index_in_dim(d_weight, expert, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(d_weight, part, expert, axis=0), d_rows

    # The sum over an expert's blocks is float32; experts without rows keep gradients of exactly zero.
    zeros = jnp.zeros(weight.shape, jnp.float32)
    d_weight, d_rows = jax.lax.scan(gradients, zeros, (rows, slope, experts))
    return d_rows, d_weight.astype(weight.dtype), None


grouped_matmul.defvjp(_forward, _backward)
