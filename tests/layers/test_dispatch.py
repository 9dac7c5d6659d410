"""Dispatch of rows to experts and back: a permutation with padding, for any routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from layers.dispatch import LocalDispatch
from tests import helpers

# tokens, experts a token, experts, largest block. Few shapes, since each compiles once; any routing.
SHAPES = [(1, 1, 1, 128), (5, 2, 3, 8), (13, 3, 9, 128), (96, 1, 2, 16), (70, 2, 1, 128)]


@functools.cache
def planner(experts: int, largest: int):
    return helpers.jit(lambda chosen: LocalDispatch(largest).plan(chosen, experts))


@st.composite
def routings(draw):
    """Chosen experts of random tokens, with up to all of them on one expert, and the shape's other sizes."""
    tokens, k, experts, largest = draw(st.sampled_from(SHAPES))
    allowed = draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=experts, unique=True))
    picks = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).choice(allowed, (tokens, k))
    return picks.astype(np.int32), experts, largest


@given(routings())
def test_the_plan_is_a_permutation_that_drops_nothing(routing):
    chosen, experts, largest = routing
    plan = jax.tree.map(np.asarray, planner(experts, largest)(chosen))
    rows, blocks = plan.choice_of_row.size, plan.experts.size
    assert rows % blocks == 0
    assert 8 <= rows // blocks <= max(8, largest)
    assert ((plan.row_of_choice >= 0) & (plan.row_of_choice < rows)).all()
    assert ((plan.experts >= 0) & (plan.experts < experts)).all()
    flat = plan.row_of_choice.reshape(-1)
    np.testing.assert_array_equal(plan.choice_of_row[flat], np.arange(chosen.size))
    assert (np.delete(plan.choice_of_row, flat) == chosen.size).all()
    np.testing.assert_array_equal(plan.experts[flat // (rows // blocks)], chosen.reshape(-1))


@given(routings())
def test_rows_of_an_expert_keep_the_order_of_the_tokens(routing):
    chosen, experts, largest = routing
    rows = np.asarray(planner(experts, largest)(chosen).row_of_choice).reshape(-1)
    for expert in range(experts):
        assert (np.diff(rows[chosen.reshape(-1) == expert]) > 0).all()


def naive_send(x, chosen, plan):
    """Row by row from the token it belongs to, zeros for padding."""
    k = chosen.shape[1]
    real = plan.choice_of_row < chosen.size
    rows = x[jnp.where(real, plan.choice_of_row, 0) // k] * real[:, None].astype(x.dtype)
    return rows.reshape(plan.experts.size, -1, x.shape[1])


def naive_receive(rows, weights, plan):
    flat = rows.reshape(-1, rows.shape[-1])
    return jnp.sum(weights[..., None] * flat[plan.row_of_choice], axis=1)


@pytest.mark.parametrize(("tokens", "k", "experts", "largest"), SHAPES)
def test_values_and_gradients_equal_the_naive_forms(tokens, k, experts, largest):
    dispatch = LocalDispatch(largest)
    chosen = np.random.default_rng(0).integers(0, experts, (tokens, k)).astype(np.int32)
    x, weights = helpers.normal(1, tokens, 3), helpers.normal(2, tokens, k)

    @helpers.jit
    def both(x, weights, chosen):
        plan = dispatch.plan(chosen, experts)
        row_shape = (plan.experts.size, plan.choice_of_row.size // plan.experts.size, 3)
        slope = jnp.asarray(helpers.normal(3, *row_shape))
        rows, slope_back = jnp.asarray(helpers.normal(4, *row_shape)), jnp.asarray(helpers.normal(5, tokens, 3))

        def gradients(send, receive):
            sent, pull_send = jax.vjp(send, x)
            received, pull_receive = jax.vjp(receive, rows, weights)
            return sent, pull_send(slope), received, pull_receive(slope_back)

        ours = gradients(lambda x: dispatch.send(x, plan), lambda r, w: dispatch.receive(r, w, plan))
        naive = gradients(lambda x: naive_send(x, chosen, plan), lambda r, w: naive_receive(r, w, plan))
        return ours, naive

    actual, expected = both(x, weights, chosen)
    helpers.assert_bit_equal(actual[0], expected[0])
    helpers.assert_close(actual, expected, helpers.FLOAT32)


def test_padding_is_never_read_and_gets_no_gradient():
    dispatch = LocalDispatch()
    plan = planner(2, 128)(jnp.asarray(np.zeros((3, 1), np.int32)))
    padding = np.asarray(plan.choice_of_row) == 3
    rows = np.where(padding[:, None], np.nan, np.ones((len(padding), 2))).astype(np.float32)

    @helpers.jit
    def receive(rows):
        out, pull = jax.vjp(lambda rows: dispatch.receive(rows, jnp.ones((3, 1)), plan), rows)
        return out, pull(out)[0]

    out, gradient = helpers.host(receive(rows.reshape(plan.experts.size, -1, 2)))
    helpers.assert_bit_equal(out, np.ones((3, 2), np.float32))
    assert (gradient.reshape(-1, 2)[padding] == 0).all()
    assert (gradient.reshape(-1, 2)[~padding] == 1).all()
