"""Choice of experts: who is chosen, with what weight, and what the statistics say."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import Router
from tests import helpers, reference

KEY = jax.random.key(0)
DIM = 5
# experts, experts a token, options
CASES = {
    "one": (1, 1, {"normalize": False}),
    "v3": (8, 3, {"groups": 4, "groups_kept": 2, "scale": 2.5}),
    "v2": (
        8,
        2,
        {
            "affinity": "softmax",
            "selection_bias": False,
            "groups": 4,
            "groups_kept": 2,
            "group_score": "max",
            "normalize": False,
            "scale": 16.0,
        },
    ),
    "nine": (9, 2, {"affinity": "softmax", "groups": 3, "groups_kept": 2, "group_score": "top2"}),
    "groups_of_one": (4, 2, {"groups": 4, "groups_kept": 3}),
    "all": (4, 4, {}),
}


def router(case, seed: int = 0) -> Router:
    experts, k, options = case
    return helpers.drawn(lambda: Router(DIM, experts, k, **options, key=KEY), seed)


def with_bias(layer: Router, bias) -> Router:
    return eqx.tree_at(lambda r: r.bias.value, layer, jnp.asarray(bias, jnp.float32))


def tokens(seed: int = 9, batch: int = 2, length: int = 13):
    return jnp.asarray(helpers.normal(seed, batch, length, DIM))


def oracle_affinity(layer: Router, x) -> np.ndarray:
    return reference.affinities(helpers.wide(x) @ helpers.wide(layer.weight), layer.affinity)


run = helpers.jit(lambda layer, x: layer(x))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_oracle(case):
    layer, x = router(case), tokens()
    routing = run(layer, x)
    affinity = oracle_affinity(layer, x)
    bias = None if layer.bias is None else helpers.wide(layer.bias.value)
    names = ("groups", "groups_kept", "group_score", "normalize", "scale")
    options = {name: getattr(layer, name) for name in names}
    expected = [reference.route(row, layer.experts_per_token, bias, **options) for row in affinity]
    np.testing.assert_array_equal(routing.chosen, [chosen for _, chosen in expected])
    helpers.assert_close(routing.weights, np.stack([weights for weights, _ in expected]), helpers.FLOAT32)
    losses = [reference.balance_loss(row, layer.experts_per_token) for row in affinity]
    helpers.assert_close(routing.balance_loss, np.array(losses), helpers.FLOAT32)
    counts = np.bincount(np.ravel(routing.chosen), minlength=layer.weight.shape[1])
    np.testing.assert_array_equal(routing.counts, counts)


@pytest.mark.parametrize("name", ["v3", "nine", "all"])
def test_the_bias_only_selects(name):
    layer, x = router(CASES[name]), tokens()
    experts, k, _ = CASES[name]
    bias = np.zeros(experts)
    bias[-1] = 5
    routing = run(with_bias(layer, bias), x)
    assert (np.asarray(routing.chosen)[..., 0] == experts - 1).all()
    taken = np.take_along_axis(oracle_affinity(layer, x), np.asarray(routing.chosen), axis=-1)
    helpers.assert_close(routing.weights, layer.scale * taken / taken.sum(-1, keepdims=True), helpers.FLOAT32)
    assert k == taken.shape[-1]


@pytest.mark.parametrize("name", ["v3", "nine", "groups_of_one"])
@pytest.mark.parametrize("shift", [-1.2, 3.0])
def test_a_bias_equal_for_all_changes_nothing(name, shift):
    """At -1.2 every biased sigmoid is below zero: groups masked with zero instead of minus infinity would win."""
    layer, x = router(CASES[name]), tokens()
    experts = CASES[name][0]
    plain, shifted = (run(with_bias(layer, np.full(experts, b)), x) for b in (0.0, shift))
    helpers.assert_bit_equal(shifted, plain)
    group_of = np.asarray(shifted.chosen) // (experts // layer.groups)
    assert all(len(set(row)) <= layer.groups_kept for row in group_of.reshape(-1, group_of.shape[-1]))


@pytest.mark.parametrize("name", ["v3", "v2", "nine", "all"])
def test_normalised_weights_sum_to_the_scale(name):
    layer, x = router(CASES[name]), tokens()
    for scaled in (x, 0 * x, 30 * x):
        routing = run(layer, scaled)
        sums = np.sum(routing.weights, axis=-1)
        if layer.normalize:
            helpers.assert_close(sums, np.full(sums.shape, layer.scale), helpers.FLOAT32)
        else:
            taken = np.take_along_axis(oracle_affinity(layer, scaled), np.asarray(routing.chosen), axis=-1)
            helpers.assert_close(routing.weights, layer.scale * taken, helpers.FLOAT32)
        assert all(
            len(set(row)) == len(row) for row in np.asarray(routing.chosen).reshape(-1, routing.chosen.shape[-1])
        )


def test_the_weights_alone_carry_gradients_and_the_bias_none():
    layer, x = router(CASES["v3"]), tokens()

    def loss(layer, x):
        routing = layer(x)
        return jnp.sum(jnp.sin(routing.weights)) + jnp.sum(routing.balance_loss)

    gradient = helpers.jit(eqx.filter_grad(loss))(layer, x)
    assert (np.asarray(gradient.bias.value) == 0).all()
    assert (np.asarray(gradient.weight) != 0).all()


def test_weight_gradients_equal_those_of_the_formula_with_the_choice_fixed():
    layer, x = router(CASES["v3"]), tokens()
    chosen = run(layer, x).chosen

    def formula(weight):
        affinity = jnp.take_along_axis(jax.nn.sigmoid(x @ weight), chosen, axis=-1)
        return jnp.sum(jnp.sin(2.5 * affinity / jnp.sum(affinity, axis=-1, keepdims=True)))

    through = eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(layer(x).weights)))
    actual, expected = helpers.jit(lambda layer: (through(layer).weight, jax.grad(formula)(layer.weight)))(layer)
    helpers.assert_close(actual, expected, helpers.FLOAT32)


@pytest.mark.parametrize("name", ["v3", "v2"])
def test_the_balance_loss_is_really_differentiated(name):
    """Eq. 17-20 with the frequencies held fixed; the gradient flows through the mean affinities."""
    layer, x = router(CASES[name]), tokens()
    experts, k, _ = CASES[name]
    affinity = oracle_affinity(layer, x)
    top = np.argsort(-affinity, axis=-1, kind="stable")[..., :k]
    hits = np.stack([np.bincount(row.ravel(), minlength=experts) for row in top]).astype(np.float32)

    def formula(weight):
        scores = x @ weight
        affinity = jax.nn.softmax(scores) if layer.affinity == "softmax" else jax.nn.sigmoid(scores)
        shares = jnp.mean(affinity / jnp.sum(affinity, axis=-1, keepdims=True), axis=1)
        return jnp.sum(experts / (k * x.shape[1]) * hits * shares)

    through = eqx.filter_grad(lambda layer: jnp.sum(layer(x).balance_loss))
    actual, expected = helpers.jit(lambda layer: (through(layer).weight, jax.grad(formula)(layer.weight)))(layer)
    helpers.assert_close(actual, expected, helpers.FLOAT32)
    assert (np.asarray(actual) != 0).all()


def identity_router(experts: int, k: int) -> Router:
    """Scores are the input itself."""
    layer = router((experts, k, {"selection_bias": False}))
    return eqx.tree_at(lambda r: r.weight, layer, jnp.asarray(np.eye(experts, dtype=np.float32)))


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (6, 2), (9, 3), (4, 4)])
def test_even_load_has_balance_loss_one_and_uneven_load_more(experts, k):
    layer = identity_router(experts, k)
    cyclic = np.stack([np.roll(np.arange(experts), t) for t in range(experts)])[None].astype(np.float32)
    same = np.broadcast_to(cyclic[:, :1], cyclic.shape)
    even, uneven = np.asarray(run(layer, jnp.asarray(np.concatenate([cyclic, same]))).balance_loss)
    assert even == pytest.approx(1, rel=helpers.FLOAT32)
    assert uneven > 1.05 if k < experts else uneven == pytest.approx(1, rel=helpers.FLOAT32)


def test_one_sequence_does_not_balance_another():
    layer, x = router(CASES["v3"]), tokens()
    both, alone = run(layer, x), [run(layer, x[i : i + 1]) for i in range(2)]
    losses = np.concatenate([part.balance_loss for part in alone])
    helpers.assert_close(both.balance_loss, losses, helpers.FLOAT32)
    np.testing.assert_array_equal(both.counts, sum(np.asarray(part.counts) for part in alone))


@pytest.mark.parametrize("name", ["v3", "v2", "nine"])
def test_identical_tokens_route_identically(name):
    x = np.broadcast_to(np.asarray(tokens(batch=1, length=1)), (3, 17, DIM))
    routing = helpers.host(run(router(CASES[name]), jnp.asarray(x)))
    for part in (routing.weights, routing.chosen):
        helpers.assert_bit_equal(part, np.broadcast_to(part[:1, :1], part.shape))


def test_of_experts_and_groups_that_score_alike_the_first_are_chosen():
    routing = run(with_bias(router(CASES["v3"]), np.zeros(8)), jnp.zeros((1, 3, DIM)))
    np.testing.assert_array_equal(routing.chosen, [[[0, 1, 2]] * 3])


def test_scores_and_weights_are_float32_whatever_comes_in():
    layer, x = router(CASES["v3"]), helpers.cast(tokens(), jnp.bfloat16)
    narrow = eqx.tree_at(lambda r: r.weight, layer, helpers.cast(layer.weight, jnp.bfloat16))
    helpers.assert_bit_equal(run(narrow, x), run(*helpers.cast((narrow, x), np.float32)))
    assert run(narrow, x).weights.dtype == jnp.float32


@pytest.mark.parametrize(
    ("experts", "k", "options", "message"),
    [
        (8, 2, {"groups": 3}, "num_experts=8 to be divisible by groups=3"),
        (8, 3, {"groups": 4, "groups_kept": 1}, "experts_per_token=3 .* 2 experts in reach"),
        (8, 9, {}, "experts_per_token=9 .* 8 experts in reach"),
        (8, 0, {}, "experts_per_token=0"),
    ],
)
def test_impossible_choices_are_refused(experts, k, options, message):
    with pytest.raises(ValueError, match=message):
        router((experts, k, options))
