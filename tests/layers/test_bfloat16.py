"""Every layer takes bfloat16 under strict dtype promotion, and stays near its float32 self."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import (
    MLA,
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
DIM, LENGTH = 6, 5


def positions():
    return Rope(dim=2, layout="interleaved")(jnp.arange(LENGTH, dtype=jnp.int32)[None])


def mla() -> MLA:
    return MLA(DIM, 2, query_rank=4, kv_rank=5, nope_dim=3, rope_dim=2, value_dim=3, key=KEY)


def moe() -> MoE:
    # Every expert is chosen: a choice could differ between the two dtypes.
    return MoE(Router(DIM, 3, 3, key=KEY), Experts(DIM, 4, 3, key=KEY), SwiGLU(DIM, 4, prefix="shared", key=KEY))


def call(layer, x):
    return layer(x)


def call_rotated(layer, x):
    return layer(x, positions())


def call_reporting(layer, x):
    return layer(x)[0]


def call_block(layer, x):
    return layer(x, positions())[0]


LAYERS = {
    "linear": (lambda: Linear(DIM, 3, key=KEY), call),
    "norm": (lambda: RMSNorm(DIM), call),
    "mlp": (lambda: SwiGLU(DIM, 4, key=KEY), call),
    "attention": (lambda: Attention(DIM, 2, 1, 2, key=KEY), call_rotated),
    "mla": (mla, call_rotated),
    "moe": (moe, call_reporting),
}
BLOCKS = {
    "dense_block": (lambda: DenseBlock(Attention(DIM, 2, 1, 2, key=KEY), SwiGLU(DIM, 4, key=KEY), DIM), call_block),
    "moe_block": (lambda: MoEBlock(mla(), moe(), DIM), call_block),
}


def narrow(tree):
    parameters, buffers = split_buffers(tree)
    return eqx.combine(helpers.cast(parameters, jnp.bfloat16), buffers)


def case(make):
    """The layer in bfloat16 and an input, and both with the same values in float32."""
    args = narrow(helpers.drawn(make)), helpers.cast(helpers.normal(99, 2, LENGTH, DIM), jnp.bfloat16)
    return args, helpers.cast(args, np.float32)


@pytest.mark.parametrize(("make", "apply"), LAYERS.values(), ids=LAYERS)
def test_values_and_gradients_are_close_to_those_of_float32(make, apply):
    @helpers.jit
    def run(layer, x):
        out, pull = eqx.filter_vjp(apply, layer, x)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))

    args, widened = case(make)
    out, gradients = run(*args)
    assert out.dtype == jnp.bfloat16
    assert [g.dtype for g in jax.tree.leaves(gradients)] == [p.dtype for p in jax.tree.leaves(args)]
    expected, expected_gradients = run(*widened)
    helpers.assert_close(out, expected, helpers.BFLOAT16)
    helpers.assert_close(gradients, expected_gradients, helpers.BFLOAT16_GRADIENT)


@pytest.mark.parametrize(("make", "apply"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_give_bfloat16_close_to_float32(make, apply):
    args, widened = case(make)
    run = helpers.jit(apply)
    out = run(*args)
    assert out.dtype == jnp.bfloat16
    helpers.assert_close(out, run(*widened), helpers.BFLOAT16)


def test_embedding_gives_rows_of_the_weights_dtype():
    embedding = narrow(helpers.drawn(lambda: Embedding(9, DIM, key=KEY)))
    assert embedding(jnp.asarray([[1, 2]], jnp.int32)).dtype == jnp.bfloat16
