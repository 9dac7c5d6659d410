"""Every layer works by itself under jit, vmap and grad, without the rest of the package."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import split_buffers
from tests import helpers
from tests.layers.samples import DIM, LAYERS, SEQ


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
