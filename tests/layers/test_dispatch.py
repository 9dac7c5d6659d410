"""Dispatch of rows to experts and back: a permutation with padding, for any routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from layers.dispatch import CapacityDispatch, LocalDispatch
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
    choices = plan.choice_of_row.reshape(-1)
    np.testing.assert_array_equal(choices[flat], np.arange(chosen.size))
    assert (np.delete(choices, flat) == chosen.size).all()
    np.testing.assert_array_equal(plan.experts[flat // (rows // blocks)], chosen.reshape(-1))


@given(routings())
def test_rows_of_an_expert_keep_the_order_of_the_tokens(routing):
    chosen, experts, largest = routing
    rows = np.asarray(planner(experts, largest)(chosen).row_of_choice).reshape(-1)
    for expert in range(experts):
        assert (np.diff(rows[chosen.reshape(-1) == expert]) > 0).all()


def naive_send(x, weights, chosen, plan):
    """Row by row from the token and the choice it belongs to, zeros for padding."""
    real = plan.choice_of_row < chosen.size
    choices = jnp.where(real, plan.choice_of_row, 0)
    rows = x[choices // chosen.shape[1]] * real[..., None].astype(x.dtype)
    return rows, weights.reshape(-1)[choices] * real.astype(weights.dtype)


def naive_receive(rows, plan):
    flat = jnp.concatenate([rows.reshape(-1, rows.shape[-1]), jnp.zeros((1, rows.shape[-1]), rows.dtype)])
    return jnp.sum(flat[plan.row_of_choice], axis=1)


DISPATCHES = {"dropless": lambda largest: LocalDispatch(largest), "capacity": lambda _: CapacityDispatch(0.6)}


@pytest.mark.parametrize("kind", DISPATCHES)
@pytest.mark.parametrize(("tokens", "k", "experts", "largest"), SHAPES)
def test_values_and_gradients_equal_the_naive_forms(tokens, k, experts, largest, kind):
    dispatch = DISPATCHES[kind](largest)
    chosen = np.random.default_rng(0).integers(0, experts, (tokens, k)).astype(np.int32)
    x, weights = helpers.normal(1, tokens, 3), helpers.normal(2, tokens, k)

    @helpers.jit
    def both(x, weights, chosen):
        plan = dispatch.plan(chosen, experts)
        sizes = plan.choice_of_row.shape
        slopes = jnp.asarray(helpers.normal(3, *sizes, 3)), jnp.asarray(helpers.normal(6, *sizes))
        rows, slope_back = jnp.asarray(helpers.normal(4, *sizes, 3)), jnp.asarray(helpers.normal(5, tokens, 3))

        def gradients(send, receive):
            sent, pull_send = jax.vjp(send, x, weights)
            received, pull_receive = jax.vjp(receive, rows)
            return sent, pull_send(slopes), received, pull_receive(slope_back)

        ours = gradients(lambda x, w: dispatch.send(x, w, plan), lambda rows: dispatch.receive(rows, plan))
        naive = gradients(lambda x, w: naive_send(x, w, chosen, plan), lambda rows: naive_receive(rows, plan))
        return ours, naive

    actual, expected = both(x, weights, chosen)
    helpers.assert_bit_equal(actual[0], expected[0])
    helpers.assert_close(actual, expected, helpers.FLOAT32)


def test_padding_is_never_read_and_gets_no_gradient():
    dispatch = LocalDispatch()
    plan = planner(2, 128)(jnp.asarray(np.zeros((3, 1), np.int32)))
    padding = np.asarray(plan.choice_of_row).reshape(-1) == 3
    rows = np.where(padding[:, None], np.nan, np.ones((len(padding), 2))).astype(np.float32)

    @helpers.jit
    def receive(rows):
        out, pull = jax.vjp(lambda rows: dispatch.receive(rows, plan), rows)
        return out, pull(out)[0]

    out, gradient = helpers.host(receive(rows.reshape(plan.experts.size, -1, 2)))
    helpers.assert_bit_equal(out, np.ones((3, 2), np.float32))
    assert (gradient.reshape(-1, 2)[padding] == 0).all()
    assert (gradient.reshape(-1, 2)[~padding] == 1).all()


# factor -> rows an expert may take, of 8 choices on 4 experts: a mean load of 2
CAPACITIES = {0.1: 1, 0.5: 1, 0.51: 2, 1.0: 2, 1.3: 3, 4.0: 8, 9.0: 8, 1e308: 8}


@pytest.mark.parametrize(("factor", "capacity"), CAPACITIES.items())
def test_a_capacity_drops_the_later_tokens_of_a_full_expert_and_counts_them(factor, capacity):
    chosen = np.array([[2, 0], [2, 1], [2, 0], [2, 3]], np.int32)
    plan = helpers.jit(lambda chosen: CapacityDispatch(factor).plan(chosen, 4))(chosen)
    assert plan.choice_of_row.size == 4 * capacity
    assert np.asarray(plan.experts).tolist() == [0, 1, 2, 3]
    kept = np.asarray(plan.row_of_choice) < 4 * capacity
    rank = np.array([[0, 0], [1, 0], [2, 1], [3, 0]])  # how many choices of that expert came before
    np.testing.assert_array_equal(kept, rank < capacity)
    rows = np.asarray(plan.row_of_choice)[kept]
    np.testing.assert_array_equal(rows // capacity, chosen[kept])
    np.testing.assert_array_equal(np.asarray(plan.choice_of_row).reshape(-1)[rows], np.flatnonzero(kept))
    assert int(plan.dropped) == 8 - kept.sum()


@given(routings())
def test_nothing_is_dropped_without_a_capacity_or_with_enough(routing):
    chosen, experts, largest = routing
    assert int(planner(experts, largest)(chosen).dropped) == 0
    enough = helpers.jit(lambda chosen: CapacityDispatch(float(experts)).plan(chosen, experts).dropped)
    assert int(enough(chosen)) == 0
