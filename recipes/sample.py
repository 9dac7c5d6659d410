"""Greedy continuation of a text, for a look at what a model has learnt."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def greedy(model: Any, prompt: Int[Array, " prompt"], length: int) -> Int[Array, " total"]:
    """The prompt followed by `length` tokens, each the likeliest after those before it.

    Recomputes the whole text for every token: for a few lines, not for serving.
    """
    start = prompt.shape[0]
    tokens = jnp.zeros((1, start + length), jnp.int32).at[0, :start].set(prompt)

    def extend(place: Array, tokens: Int[Array, "1 total"]) -> Int[Array, "1 total"]:
        hidden = model.forward(tokens).hidden
        last = jax.lax.dynamic_index_in_dim(hidden, place - 1, axis=1, keepdims=False)
        best = jnp.argmax(last @ model.unembedding, axis=-1).astype(jnp.int32)
        return jax.lax.dynamic_update_index_in_dim(tokens, best, place, axis=1)

    return jax.lax.fori_loop(start, start + length, extend, tokens)[0]
