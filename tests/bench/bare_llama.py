"""The floor that `bench_llama` is measured against: the same step by hand in plain JAX, one scan, all recomputed."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

VOCAB, DIM, HEADS, HEAD_DIM, HIDDEN, LAYERS = 1024, 256, 4, 64, 688, 4


def init(key: Array) -> dict[str, Any]:
    """Parameters: 3,688,704 numbers, as `bench_llama` has."""
    stacked = {
        **dict.fromkeys(("q", "k", "v"), (DIM, HEADS, HEAD_DIM)),
        "o": (HEADS, HEAD_DIM, DIM),
        "gate": (DIM, HIDDEN),
        "up": (DIM, HIDDEN),
        "down": (HIDDEN, DIM),
    }
    keys = iter(jax.random.split(key, 2 + len(stacked)))
    blocks = {name: 0.02 * jax.random.normal(next(keys), (LAYERS, *shape)) for name, shape in stacked.items()}
    blocks |= {"norm1": jnp.ones((LAYERS, DIM)), "norm2": jnp.ones((LAYERS, DIM))}
    ends = {"embed": (VOCAB, DIM), "head": (DIM, VOCAB)}
    return {
        **{name: 0.02 * jax.random.normal(next(keys), shape) for name, shape in ends.items()},
        "norm": jnp.ones(DIM),
        "blocks": blocks,
    }


def loss(params: dict[str, Any], tokens: Array) -> Array:
    """Mean cross-entropy of tokens 1.. given those before."""
    x = params["embed"][tokens[:, :-1]]
    body = jax.checkpoint(_block, policy=jax.checkpoint_policies.nothing_saveable)
    x, _ = jax.lax.scan(body, x, params["blocks"])
    logits = _norm(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _block(x: Array, w: dict[str, Array]) -> tuple[Array, None]:
    h = _norm(x, w["norm1"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", h, w[name]) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", _rope(q), _rope(k)) * HEAD_DIM**-0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    x = x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqk,bkhd->bqhd", weights, v), w["o"])
    h = _norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def _norm(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _rope(x: Array) -> Array:
    half = HEAD_DIM // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
