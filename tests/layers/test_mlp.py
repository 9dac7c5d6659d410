"""The gated feed-forward layer, and the linear and embedding layers under it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import Embedding, Linear, SwiGLU
from tests import helpers, reference

KEY = jax.random.key(0)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 5, 4)])
@pytest.mark.parametrize("hidden", [1, 7])
def test_equals_the_oracle(shape, hidden):
    mlp, x = helpers.drawn(lambda: SwiGLU(4, hidden, key=KEY)), helpers.normal(9, *shape)
    weights = helpers.wide([mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight])
    actual = helpers.jit(mlp)(jnp.asarray(x))
    helpers.assert_close(actual, reference.swiglu(helpers.wide(x), *weights), helpers.FLOAT32)


def test_weights_are_normal_with_the_given_deviation():
    for std in (0.02, 0.5):
        for weight in (Linear(64, 64, std=std, key=KEY).weight, Embedding(64, 64, std=std, key=KEY).weight):
            # The deviation of 4096 draws is known to 1.1% (one sigma).
            assert np.std(weight) == pytest.approx(std, rel=0.05)
            assert abs(np.mean(weight)) < 0.1 * std


def test_the_three_weights_are_drawn_apart():
    mlp = SwiGLU(4, 4, key=KEY)
    gate, up, down = (np.asarray(part.weight) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    assert not any((a == b).any() for a, b in ((gate, up), (up, down), (gate, down)))


def test_embedding_takes_rows():
    embedding, tokens = helpers.drawn(lambda: Embedding(9, 3, key=KEY)), np.array([[0, 8, 3, 3]], np.int32)
    helpers.assert_bit_equal(embedding(jnp.asarray(tokens)), embedding.weight[tokens])
