"""One small instance of every layer, and how it is called with `x` `[batch, SEQ, DIM]`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layers import (
    MLA,
    MTP,
    Attention,
    DenseBlock,
    Embedding,
    Experts,
    Linear,
    MoE,
    MoEBlock,
    RMSNorm,
    Rope,
    Router,
    SwiGLU,
)

KEY = jax.random.key(0)
DIM, HEADS, SEQ = 6, 2, 5
ROTATION = Rope(dim=2, layout="interleaved")(jnp.arange(SEQ, dtype=jnp.int32)[None])


def attention() -> Attention:
    return Attention(DIM, HEADS, 1, 2, key=KEY)


def mla() -> MLA:
    return MLA(DIM, HEADS, query_rank=4, kv_rank=5, nope_dim=3, rope_dim=2, value_dim=3, key=KEY)


def mlp() -> SwiGLU:
    return SwiGLU(DIM, 4, key=KEY)


def moe() -> MoE:
    """Every expert is chosen: a choice could differ between dtypes."""
    return MoE(Router(DIM, 3, 3, key=KEY), Experts(DIM, 4, 3, key=KEY), SwiGLU(DIM, 4, prefix="shared", key=KEY))


def plain(layer: Any, x: Any) -> Any:
    return layer(x)


def rotated(layer: Any, x: Any) -> Any:
    return layer(x, ROTATION)


def routed(layer: Any, x: Any) -> Any:
    """Experts alone: rows of tokens, their weights and choices."""
    tokens = x.reshape(-1, DIM)
    weights = jnp.sin(jnp.arange(2 * len(tokens), dtype=jnp.float32)).reshape(-1, 2)
    return layer(tokens, weights, jnp.argsort(jnp.sin(7 * tokens), axis=1)[:, :2].astype(jnp.int32))


# layer -> how it is made and how it is called
LAYERS: dict[str, tuple[Callable, Callable]] = {
    "linear": (lambda: Linear(DIM, 3, std=1.0, key=KEY), plain),
    "norm": (lambda: RMSNorm(DIM), plain),
    "embedding": (lambda: Embedding(7, DIM, std=1.0, key=KEY), lambda layer, x: x + layer(jnp.ones((1, 1), jnp.int32))),
    "rope": (lambda: Rope(dim=DIM), lambda layer, x: layer(jnp.arange(SEQ, dtype=jnp.int32)[None])(x[:, :, None])),
    "attention": (attention, rotated),
    "mla": (mla, rotated),
    "mlp": (mlp, plain),
    "router": (lambda: Router(DIM, 4, 2, groups=2, key=KEY), plain),
    "experts": (lambda: Experts(DIM, 3, 6, key=KEY), routed),
    "moe": (moe, plain),
    "dense_block": (lambda: DenseBlock(attention(), mlp(), DIM), rotated),
    "moe_block": (lambda: MoEBlock(mla(), moe(), DIM), rotated),
    "mtp": (lambda: MTP(DenseBlock(attention(), mlp(), DIM), DIM, key=KEY), lambda layer, x: layer(x, x, ROTATION)),
}
