"""Continuation of a text, for a look at what a model has learnt."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from recipes.placement.segments import outside_at_hand
from recipes.sharding.spread import gather


def generate(
    model: Any,
    prompt: Int[Array, " prompt"],
    length: int,
    *,
    temperature: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> Int[Array, " total"]:
    r"""The prompt followed by `length` tokens, each drawn from $\mathrm{softmax}(\mathrm{logits} / T)$.

    At temperature 0 each is the likeliest after those before it, and no key is needed. Recomputes the whole text for
    every token: for a few lines, not for serving. Raises ValueError for a negative temperature, or a positive one
    without a key.
    """
    if temperature < 0 or (temperature > 0 and key is None):
        raise ValueError(f"Expected {temperature=} to be 0, or above it and a key")
    model, start = gather(outside_at_hand(model)), prompt.shape[0]  # one sequence is not split over a mesh
    tokens = jnp.zeros((1, start + length), jnp.int32).at[0, :start].set(prompt.astype(jnp.int32))

    def extend(place: Array, tokens: Int[Array, "1 total"]) -> Int[Array, "1 total"]:
        hidden = model.forward(tokens).hidden
        last = jax.lax.dynamic_index_in_dim(hidden, place - 1, axis=1, keepdims=False)
        logits = (last @ model.unembedding).astype(jnp.float32)
        if temperature > 0 and key is not None:
            chosen = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
        else:
            chosen = jnp.argmax(logits, axis=-1)
        return jax.lax.dynamic_update_index_in_dim(tokens, chosen.astype(jnp.int32), place, axis=1)

    return jax.lax.fori_loop(start, start + length, extend, tokens)[0]
