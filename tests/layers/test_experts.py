"""Routed experts against the dense computation, in which every token passes every expert."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import CapacityDispatch, Dispatch, Experts, LocalDispatch
from tests import helpers, reference

KEY = jax.random.key(0)
DIM, HIDDEN = 4, 3


def layer(num_experts: int, dispatch: Dispatch = LocalDispatch()) -> Experts:
    return helpers.drawn(lambda: Experts(DIM, HIDDEN, num_experts, dispatch=dispatch, key=KEY), std=0.7)


def random_choice(tokens: int, k: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(tokens)
    return np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)


# experts, largest block, chosen experts of each token
ROUTINGS = {
    "one_expert": (1, 128, np.zeros((5, 1), np.int32)),
    "one_token": (9, 128, random_choice(1, 2, 9)),
    "nine_experts": (9, 8, random_choice(13, 3, 9)),
    "all_on_one": (9, 8, np.full((21, 1), 4, np.int32)),
    "all_on_the_last": (3, 128, np.full((21, 1), 2, np.int32)),
    "every_expert": (4, 128, random_choice(7, 4, 4)),
    "one_expert_twice": (3, 128, np.array([[1, 1], [0, 1], [1, 1]], np.int32)),
    "larger_blocks": (2, 32, random_choice(130, 1, 2)),
}


def dense(experts: Experts, x, weights, chosen):
    """Every token through every expert, weighted by what it gave each."""
    one_hot = jax.nn.one_hot(chosen, experts.gate_proj.shape[0], dtype=x.dtype)
    given = jnp.einsum("tk,tke->te", weights, one_hot)
    gate, up = (jnp.einsum("td,edf->tef", x, part) for part in (experts.gate_proj, experts.up_proj))
    return jnp.einsum("tef,efd,te->td", jax.nn.silu(gate) * up, experts.down_proj, given)


@helpers.jit
def with_gradients(experts, x, weights, chosen):
    """Results and gradients of the layer and of the dense computation."""

    def one(f):
        out, pull = eqx.filter_vjp(lambda e, x, w: f(e, x, w, chosen), experts, x, weights)
        return out, pull(jnp.sin(jnp.arange(out.size, dtype=jnp.float32) + 1).reshape(out.shape))

    return one(lambda e, *args: e(*args)[0]), one(dense)


def by_expert(gradient: Experts) -> dict[str, list]:
    """Gradients expert by expert, so that a wrong one cannot hide behind one with larger gradients."""
    return {name: list(np.asarray(getattr(gradient, name))) for name in ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize(("num_experts", "largest", "chosen"), ROUTINGS.values(), ids=ROUTINGS)
def test_any_routing_equals_the_dense_computation(num_experts, largest, chosen):
    experts, x = layer(num_experts, LocalDispatch(largest)), jnp.asarray(helpers.normal(7, len(chosen), DIM))
    weights, picks = jnp.asarray(helpers.normal(8, *chosen.shape)), jnp.asarray(chosen)
    actual, (_, (expected, *expected_inputs)) = with_gradients(experts, x, weights, picks)
    out, (d_experts, *d_inputs) = actual
    names = {"gate": experts.gate_proj, "up": experts.up_proj, "down": experts.down_proj}
    oracle = reference.experts(helpers.wide(x), helpers.wide(names), helpers.wide(weights), chosen)
    helpers.assert_close(out, oracle, helpers.FLOAT32)
    helpers.assert_close(d_inputs, expected_inputs, helpers.FLOAT32)
    helpers.assert_close(by_expert(d_experts), by_expert(expected), helpers.FLOAT32)
    busy = set(chosen.reshape(-1).tolist())
    for gradients in by_expert(d_experts).values():
        assert [bool((gradient != 0).any()) for gradient in gradients] == [e in busy for e in range(num_experts)]


def test_the_order_of_experts_does_not_matter():
    experts, (x, weights) = layer(5), (jnp.asarray(helpers.normal(i, 9, n)) for i, n in ((7, DIM), (8, 2)))
    chosen, order = random_choice(9, 2, 5), np.array([3, 0, 4, 1, 2])
    permuted = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[order]), experts)
    run = helpers.jit(lambda e, chosen: e(x, weights, chosen)[0])
    renamed = np.argsort(order).astype(np.int32)[chosen]
    helpers.assert_close(run(permuted, jnp.asarray(renamed)), run(experts, jnp.asarray(chosen)), helpers.FLOAT32)


def test_other_tokens_do_not_change_a_tokens_result():
    """No capacity is shared: a token's row is the same whoever else comes to its expert."""
    experts, x = layer(3), jnp.asarray(helpers.normal(7, 40, DIM))
    run = helpers.jit(lambda chosen: experts(x, jnp.ones((40, 1)), chosen)[0])
    spread = np.arange(40, dtype=np.int32)[:, None] % 3
    together = np.zeros((40, 1), np.int32)
    alike = spread[:, 0] == 0
    one, other = (np.asarray(run(jnp.asarray(chosen))) for chosen in (spread, together))
    helpers.assert_close(one[alike], other[alike], helpers.FLOAT32)


def test_a_capacity_takes_away_the_dropped_choices_and_nothing_else():
    """Nine tokens on three experts, two each: with a capacity of 3 of the mean 6, the results are those of the kept."""
    chosen = random_choice(9, 2, 3)
    x, weights = jnp.asarray(helpers.normal(7, 9, DIM)), helpers.normal(8, 9, 2)
    limited = layer(3, CapacityDispatch(0.5))
    plan = limited.dispatch.plan(jnp.asarray(chosen), 3)
    kept = np.asarray(plan.row_of_choice) < 3 * 3
    run = helpers.jit(lambda layer, weights: layer(x, weights, jnp.asarray(chosen)))
    y, dropped = run(limited, jnp.asarray(weights))
    assert 0 < int(dropped) == (~kept).sum() < 18
    helpers.assert_close(y, run(layer(3), jnp.asarray(weights * kept))[0], helpers.FLOAT32)
