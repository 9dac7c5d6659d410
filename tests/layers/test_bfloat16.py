"""Every layer takes bfloat16 under strict dtype promotion, and stays near its float32 self."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import Embedding, split_buffers
from tests import helpers
from tests.layers.samples import DIM, KEY, LAYERS, SEQ

ALONE = ("linear", "norm", "mlp", "attention", "mla", "moe")
BLOCKS = ("dense_block", "moe_block")


def first(apply):
    """The hidden states that a layer returns, without what it reports."""
    return lambda layer, x: jax.tree.leaves(apply(layer, x))[0]


def narrow(tree):
    parameters, buffers = split_buffers(tree)
    return eqx.combine(helpers.cast(parameters, jnp.bfloat16), buffers)


def case(make):
    """The layer in bfloat16 and an input, and both with the same values in float32."""
    args = narrow(helpers.drawn(make)), helpers.cast(helpers.normal(99, 2, SEQ, DIM), jnp.bfloat16)
    return args, helpers.cast(args, np.float32)


@pytest.mark.parametrize(("make", "apply"), [LAYERS[name] for name in ALONE], ids=ALONE)
def test_values_and_gradients_are_close_to_those_of_float32(make, apply):
    @helpers.jit
    def run(layer, x):
        out, pull = eqx.filter_vjp(first(apply), layer, x)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))

    args, widened = case(make)
    out, gradients = run(*args)
    assert out.dtype == jnp.bfloat16
    assert [g.dtype for g in jax.tree.leaves(gradients)] == [p.dtype for p in jax.tree.leaves(args)]
    expected, expected_gradients = run(*widened)
    helpers.assert_close(out, expected, helpers.BFLOAT16)
    helpers.assert_close(gradients, expected_gradients, helpers.BFLOAT16_GRADIENT)


@pytest.mark.parametrize(("make", "apply"), [LAYERS[name] for name in BLOCKS], ids=BLOCKS)
def test_blocks_give_bfloat16_close_to_float32(make, apply):
    args, widened = case(make)
    run = helpers.jit(first(apply))
    out = run(*args)
    assert out.dtype == jnp.bfloat16
    helpers.assert_close(out, run(*widened), helpers.BFLOAT16)


def test_embedding_gives_rows_of_the_weights_dtype():
    embedding = narrow(helpers.drawn(lambda: Embedding(9, DIM, key=KEY)))
    assert embedding(jnp.asarray([[1, 2]], jnp.int32)).dtype == jnp.bfloat16
