"""Token embedding and its inverse, the projection to logits."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from layers.axes import Axes
from layers.wide import rows


class Embedding(eqx.Module):
    """Rows of `weight` `[vocab, dim]` by token. A tied model unembeds with the transposed weight of this one leaf."""

    weight: Float[Array, "vocab dim"]
    wide: bool = eqx.field(static=True)  # see `layers.wide`
    axes: ClassVar[Axes] = {"weight": ("vocab", "embed")}

    def __init__(self, vocab_size: int, dim: int, *, std: float = 0.02, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (vocab_size, dim), jnp.float32)
        self.wide = False

    def __call__(self, tokens: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq dim"]:
        return rows(self.weight, tokens) if self.wide else jnp.take(self.weight, tokens, axis=0)
