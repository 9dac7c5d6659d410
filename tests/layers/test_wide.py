"""Wide gradients: the same values, sums in float32 that are rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import Embedding, Experts, Linear, RMSNorm
from layers.wide import widened
from tests import helpers

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, 5, (2, 7)).astype(np.int32)
X = helpers.normal(0, 2, 7, 6)
WEIGHTS, CHOSEN = np.abs(helpers.normal(1, 2, 7, 2)), TOKENS[..., None] % 3 + np.arange(2, dtype=np.int32)
LAYERS = {
    "linear": (lambda: Linear(6, 3, key=KEY), (X,)),
    "embedding": (lambda: Embedding(5, 3, key=KEY), (TOKENS,)),
    "norm": (lambda: RMSNorm(6), (X,)),
    "experts": (lambda: Experts(6, 4, 5, key=KEY), (X, WEIGHTS, CHOSEN)),
}


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_the_plain_layer(name):
    make, args = LAYERS[name]
    layer = helpers.drawn(make)
    floats = [jnp.asarray(arg) for arg in args if arg.dtype == np.float32]
    others = [jnp.asarray(arg) for arg in args if arg.dtype != np.float32]

    def loss(layer, *floats):
        y = first(layer(*floats, *others))
        return jnp.sum(jnp.sin(y)), y

    run = helpers.jit(jax.value_and_grad(loss, argnums=tuple(range(1 + len(floats))), has_aux=True))
    plain, wide = run(layer, *floats), run(widened(layer), *floats)
    helpers.assert_close(jax.tree.leaves(wide), jax.tree.leaves(plain), helpers.FLOAT32)


@pytest.mark.parametrize("name", ["linear", "embedding", "norm"])
def test_a_sum_of_many_small_numbers_is_rounded_once(name):
    """1 + 1/256 added 512 times: bfloat16 stops growing long before."""
    count, slope = 512, 1.0 + 2**-7
    layer = {
        "linear": lambda: Linear(1, 1, key=KEY),
        "embedding": lambda: Embedding(1, 1, key=KEY),
        "norm": lambda: RMSNorm(1, eps=0.0),
    }[name]()
    layer = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, jnp.bfloat16), widened(layer))
    x = jnp.zeros((4, count // 4), jnp.int32) if name == "embedding" else jnp.ones((4, count // 4, 1), jnp.bfloat16)
    scale = jnp.asarray(slope, jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda layer: jnp.sum((layer(x) * scale).astype(jnp.float32))))(layer)
    assert gradient.weight.dtype == jnp.bfloat16
    assert float(gradient.weight.reshape(())) == count * slope
