"""Root-mean-square normalisation."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from layers.wide import scaled


class RMSNorm(eqx.Module):
    r"""$y = w \cdot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}$ over the last dim.

    The statistics are float32 whatever the input; the result has the input's dtype before the weight is applied, as
    in Hugging Face's `LlamaRMSNorm`. Source: Zhang and Sennrich, arXiv 1910.07467.
    """

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)
    wide: bool = eqx.field(static=True)  # see `layers.wide`

    def __init__(self, dim: int, *, eps: float = 1e-6):
        self.weight = jnp.ones(dim, jnp.float32)
        self.eps, self.wide = eps, False

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        normed = (wide * scale).astype(x.dtype)
        return scaled(normed, self.weight) if self.wide else normed * jnp.broadcast_to(self.weight, x.shape)
