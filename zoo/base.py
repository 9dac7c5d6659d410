"""The decoder that both families are."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from layers import MTP, Embedding, Linear, MoEStats, RMSNorm, Rope, Rotation, Stack
from zoo.registry import ModelConfig
from zoo.rope import RopeConfig


class Aux(NamedTuple):
    """What a forward pass has besides hidden states.

    `moe`: the statistics of the MoE layers, None without any; those of `mtp` come last. `mtp`: for each depth $k$ of
    multi-token prediction the normalised hidden states; those of position `i` predict token `i + k + 1`, and those of
    the last `k` positions nothing.
    """

    moe: MoEStats | None = None
    mtp: tuple[Float[Array, "batch seq dim"], ...] = ()


class Output(NamedTuple):
    """Normalised last hidden states, and what else there is."""

    hidden: Float[Array, "batch seq dim"]
    aux: Aux = Aux()


class Decoder(eqx.Module):
    """Embedding, a stack of blocks, a norm and a projection to logits (`head` None: tied to the embedding).

    `mtp` holds the depths of multi-token prediction, which only `forward` computes.
    """

    embedding: Embedding
    layers: Stack
    norm: RMSNorm
    head: Linear | None
    rope: Rope
    mtp: tuple[MTP, ...] = ()

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the next token at every position."""
        return self._hidden(tokens, self._rotation(tokens, positions), segment_ids)[0] @ self.unembedding

    def forward(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Output:
        """Hidden states before the projection to logits, so that a loss may project them piece by piece.

        `positions` default to 0, 1, ...; with `segment_ids` tokens attend only to their own segment.
        """
        rotation = self._rotation(tokens, positions)
        hidden, reports = self._hidden(tokens, rotation, segment_ids)
        ahead = [hidden]
        for depth, mtp in enumerate(self.mtp, start=1):
            # The last positions see tokens from the start: no earlier position attends to them, no loss reads them.
            embedded = self.embedding(jnp.roll(tokens, -depth, axis=1))
            further, more = mtp(ahead[-1], embedded, rotation, segment_ids)
            ahead.append(further)
            reports += more
        routed = [report for report in reports if report is not None]
        moe = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routed) if routed else None
        return Output(hidden, Aux(moe, tuple(ahead[1:])))

    def _rotation(self, tokens: Int[Array, "batch seq"], positions: Int[Array, "batch seq"] | None) -> Rotation:
        return self.rope(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions)

    def _hidden(
        self, tokens: Int[Array, "batch seq"], rotation: Rotation, segment_ids: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq dim"], tuple]:
        x, reports = self.layers(self.embedding(tokens), rotation, segment_ids)
        return self.norm(x), reports

    @property
    def unembedding(self) -> Float[Array, "dim vocab"]:
        return self.embedding.weight.T if self.head is None else self.head.weight


def make_head(config: ModelConfig, *, key: PRNGKeyArray) -> Linear | None:
    """The projection to logits, None where the embedding is tied to it."""
    if config.tied_embeddings:
        return None
    return Linear(config.dim, config.vocab_size, std=config.init_std, dims=("embed", "vocab"), key=key)


def rope_config(rope: Rope) -> RopeConfig:
    """The configuration of a rotary embedding; the dim, a size of the model, is no part of it."""
    return RopeConfig(**{field.name: getattr(rope, field.name) for field in dataclasses.fields(RopeConfig)})
