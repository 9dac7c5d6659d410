"""Buffers: split off from the parameters and put back."""

import equinox as eqx
import jax
import jax.numpy as jnp

from layers import Router, split_buffers
from tests import helpers

KEY = jax.random.key(0)


def test_the_router_bias_is_the_one_buffer_and_the_rest_parameters():
    model = {"a": helpers.drawn(lambda: Router(3, 4, 2, key=KEY)), "b": [jnp.ones(2)]}
    parameters, buffers = split_buffers(model)
    assert [leaf.shape for leaf in jax.tree.leaves(buffers)] == [(4,)]
    assert [leaf.shape for leaf in jax.tree.leaves(parameters)] == [(3, 4), (2,)]
    helpers.assert_bit_equal(eqx.combine(parameters, buffers), model)


def test_a_model_without_buffers_is_all_parameters():
    parameters, buffers = split_buffers({"a": jnp.ones(2)})
    assert jax.tree.leaves(buffers) == []
    helpers.assert_bit_equal(parameters, {"a": jnp.ones(2)})
