"""Every layer works by itself under jit, vmap and grad, without the rest of the package."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    split_buffers,
)
from tests import helpers

KEY = jax.random.key(0)
DIM, HEADS, SEQ = 4, 2, 3
ROTATION = Rope(dim=2)(jnp.arange(SEQ, dtype=jnp.int32)[None])


def attention() -> Attention:
    return Attention(DIM, HEADS, 1, 2, key=KEY)


def mla() -> MLA:
    return MLA(DIM, HEADS, query_rank=3, kv_rank=3, nope_dim=3, rope_dim=2, value_dim=3, key=KEY)


def mlp() -> SwiGLU:
    return SwiGLU(DIM, 5, key=KEY)


def moe() -> MoE:
    return MoE(Router(DIM, 4, 2, groups=2, key=KEY), Experts(DIM, 3, 4, key=KEY), mlp())


def plain(layer: Any, x: Any) -> Any:
    return layer(x)


def rotated(layer: Any, x: Any) -> Any:
    return layer(x, ROTATION)


def routed(layer: Any, x: Any) -> Any:
    """Experts alone: rows of tokens, their weights and choices."""
    tokens = x.reshape(-1, DIM)
    weights = jnp.sin(jnp.arange(2 * len(tokens), dtype=jnp.float32)).reshape(-1, 2)
    return layer(tokens, weights, jnp.argsort(jnp.sin(7 * tokens), axis=1)[:, :2].astype(jnp.int32))


# layer -> how it is made, and called with x [batch, seq, dim]
LAYERS: dict[str, tuple[Callable, Callable]] = {
    "linear": (lambda: Linear(DIM, 3, std=1.0, key=KEY), plain),
    "norm": (lambda: RMSNorm(DIM), plain),
    "embedding": (lambda: Embedding(7, DIM, std=1.0, key=KEY), lambda layer, x: x + layer(jnp.ones((1, 1), jnp.int32))),
    "rope": (lambda: Rope(dim=DIM), lambda layer, x: layer(jnp.arange(SEQ, dtype=jnp.int32)[None])(x[:, :, None])),
    "attention": (attention, rotated),
    "mla": (mla, rotated),
    "mlp": (mlp, plain),
    "router": (lambda: Router(DIM, 4, 2, key=KEY), plain),
    "experts": (lambda: Experts(DIM, 3, 4, key=KEY), routed),
    "moe": (moe, plain),
    "dense_block": (lambda: DenseBlock(attention(), mlp(), DIM), rotated),
    "moe_block": (lambda: MoEBlock(mla(), moe(), DIM), rotated),
    "mtp": (lambda: MTP(DenseBlock(attention(), mlp(), DIM), DIM, key=KEY), lambda layer, x: layer(x, x, ROTATION)),
}


@pytest.mark.parametrize(("make", "call"), LAYERS.values(), ids=LAYERS)
def test_a_batch_of_gradients_equals_the_gradients_one_by_one(make: Callable, call: Callable):
    layer = helpers.drawn(make, std=0.5)
    trainable, buffers = split_buffers(layer)

    def loss(trainable: Any, x: Any) -> Any:
        outputs = jax.tree.leaves(call(eqx.combine(trainable, buffers), x))
        return sum(jnp.sum(jnp.sin(y)) for y in outputs if jnp.issubdtype(y.dtype, jnp.floating))

    gradient = jax.grad(loss, argnums=(0, 1))
    xs = jnp.asarray(helpers.normal(3, 2, 1, SEQ, DIM))
    together = helpers.host(helpers.jit(jax.vmap(gradient, in_axes=(None, 0)))(trainable, xs))
    alone = helpers.jit(gradient)
    each = [helpers.host(alone(trainable, x)) for x in xs]
    helpers.assert_close(together, jax.tree.map(lambda *parts: np.stack(parts), *each), helpers.FLOAT32)
    assert all((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(together))
