"""The decoder that both families are."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from layers import Embedding, Linear, MoEStats, RMSNorm, Rope, Stack


class Output(NamedTuple):
    """Normalised last hidden states, and the statistics of the MoE layers (None without any)."""

    hidden: Float[Array, "batch seq dim"]
    aux: MoEStats | None


class Decoder(eqx.Module):
    """Embedding, a stack of blocks, a norm and a projection to logits (`head` None: tied to the embedding)."""

    embedding: Embedding
    layers: Stack
    norm: RMSNorm
    head: Linear | None
    rope: Rope

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the next token at every position."""
        return self.forward(tokens, positions, segment_ids).hidden @ self.unembedding

    def forward(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Output:
        """Hidden states before the projection to logits, so that a loss may project them piece by piece.

        `positions` default to 0, 1, ...; with `segment_ids` tokens attend only to their own segment.
        """
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x, reports = self.layers(self.embedding(tokens), self.rope(positions), segment_ids)
        routed = [report for report in reports if report is not None]
        aux = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routed) if routed else None
        return Output(self.norm(x), aux)

    @property
    def unembedding(self) -> Float[Array, "dim vocab"]:
        return self.embedding.weight.T if self.head is None else self.head.weight
