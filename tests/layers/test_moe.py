"""The whole mixture-of-experts layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import Experts, MoE, Router, SwiGLU, split_buffers
from tests import helpers, reference

KEY = jax.random.key(0)
DIM, HIDDEN = 4, 3
# batch, sequence, experts, experts a token, shared size, router options
CASES = {
    "v3": (2, 5, 8, 2, 6, {"groups": 4, "groups_kept": 2, "scale": 2.5}),
    "v2": (1, 13, 9, 3, 3, {"affinity": "softmax", "selection_bias": False, "normalize": False, "scale": 4.0}),
    "one": (1, 1, 1, 1, None, {"normalize": False}),
    "all": (2, 3, 3, 3, None, {}),
}


def layer(case) -> MoE:
    _, _, experts, k, shared, options = case
    return helpers.drawn(
        lambda: MoE(
            Router(DIM, experts, k, **options, key=KEY),
            Experts(DIM, HIDDEN, experts, key=KEY),
            None if shared is None else SwiGLU(DIM, shared, prefix="shared", key=KEY),
        ),
        std=0.7,
    )


def tokens(case):
    return jnp.asarray(helpers.normal(99, *case[:2], DIM))


def oracle(moe: MoE, x: np.ndarray) -> np.ndarray:
    """One sequence through routed and shared experts."""
    router, experts = moe.router, moe.experts
    affinity = reference.affinities(x @ helpers.wide(router.weight), router.affinity)
    names = ("groups", "groups_kept", "group_score", "normalize", "scale")
    bias = None if router.bias is None else helpers.wide(router.bias.value)
    options = {name: getattr(router, name) for name in names}
    weights, chosen = reference.route(affinity, router.experts_per_token, bias, **options)
    parts = {name: helpers.wide(getattr(experts, f"{name}_proj")) for name in ("gate", "up", "down")}
    y = reference.experts(x, parts, weights, chosen)
    if moe.shared is None:
        return y
    return y + reference.swiglu(x, *(helpers.wide(getattr(moe.shared, f"{name}_proj").weight) for name in parts))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_oracle(case):
    moe, x = layer(case), tokens(case)
    y, stats = helpers.jit(moe)(x)
    helpers.assert_close(y, np.stack([oracle(moe, row) for row in helpers.wide(x)]), helpers.FLOAT32)
    assert int(np.sum(stats.counts)) == x.shape[0] * x.shape[1] * case[3]
    assert stats.balance_loss.shape == x.shape[:1]


def dense(moe: MoE, x):
    """All experts on all tokens, with the router's own weights of the experts it chose."""
    routing = moe.router(x)
    one_hot = jax.nn.one_hot(routing.chosen, moe.experts.gate_proj.shape[0], dtype=jnp.float32)
    given = jnp.einsum("bsk,bske->bse", routing.weights, one_hot)
    gate, up = (jnp.einsum("bsd,edf->bsef", x, part) for part in (moe.experts.gate_proj, moe.experts.up_proj))
    y = jnp.einsum("bsef,efd,bse->bsd", jax.nn.silu(gate) * up, moe.experts.down_proj, given)
    return y if moe.shared is None else y + moe.shared(x)


@pytest.mark.parametrize("name", ["v3", "all"])
def test_gradients_equal_those_of_the_dense_computation(name):
    moe, x = layer(CASES[name]), tokens(CASES[name])

    @helpers.jit
    def gradients(moe, x):
        both = (lambda m, x: m(x)[0], dense)
        return [eqx.filter_grad(lambda args, f=f: jnp.sum(jnp.sin(f(*args))))((moe, x)) for f in both]

    (actual, d_x), (expected, expected_x) = helpers.host(gradients(moe, x))
    helpers.assert_close(d_x, expected_x, helpers.FLOAT32)
    # Expert by expert: a leaf's largest value must not cover for a small expert.
    by_expert, expected_by_expert = ([list(leaf) for leaf in jax.tree.leaves(g)] for g in (actual, expected))
    helpers.assert_close(by_expert, expected_by_expert, helpers.FLOAT32)
    assert all((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(split_buffers(actual)[0]))
    assert (np.asarray(actual.router.bias.value) == 0).all()


def test_choosing_every_expert_equals_the_dense_mixture():
    """Without a choice the layer is a plain mixture, whose weights are the normalised affinities."""
    moe, x = layer(CASES["all"]), tokens(CASES["all"])
    affinity = reference.affinities(helpers.wide(x) @ helpers.wide(moe.router.weight), "sigmoid")
    parts = [helpers.wide(getattr(moe.experts, f"{name}_proj")) for name in ("gate", "up", "down")]
    outputs = np.stack([reference.swiglu(helpers.wide(x), *(part[e] for part in parts)) for e in range(3)], axis=-1)
    expected = np.einsum("bsde,bse->bsd", outputs, affinity / affinity.sum(-1, keepdims=True))
    helpers.assert_close(helpers.jit(moe)(x)[0], expected, helpers.FLOAT32)


def test_renaming_the_experts_changes_nothing():
    case = CASES["v2"]
    moe, x, order = layer(case), tokens(case), np.random.default_rng(0).permutation(9)
    experts = jax.tree.map(lambda leaf: np.asarray(leaf)[order], moe.experts)
    renamed = eqx.tree_at(
        lambda m: (m.router.weight, m.experts),
        moe,
        jax.tree.map(jnp.asarray, (np.asarray(moe.router.weight)[:, order], experts)),
    )
    run = helpers.jit(lambda moe: moe(x))
    (y, stats), (y_renamed, stats_renamed) = run(moe), run(renamed)
    helpers.assert_close(y_renamed, y, helpers.FLOAT32)
    np.testing.assert_array_equal(stats_renamed.counts, np.asarray(stats.counts)[order])


def test_identical_tokens_give_identical_results():
    case = CASES["v3"]
    y, stats = helpers.jit(layer(case))(np.broadcast_to(np.asarray(tokens(case))[:1, :1], (2, 9, DIM)))
    helpers.assert_bit_equal(np.asarray(y), np.broadcast_to(np.asarray(y)[:1, :1], y.shape))
    assert sorted(np.asarray(stats.counts).tolist()) == [0] * 6 + [18] * 2


def test_idle_experts_get_gradients_of_exactly_zero():
    case = CASES["v3"]
    moe, x = layer(case), tokens(case)
    bias = jnp.asarray([0.0, 0, 50, 50, 0, 0, 0, 0])
    moe = eqx.tree_at(lambda m: m.router.bias.value, moe, bias)
    gradient = helpers.jit(eqx.filter_grad(lambda m: jnp.sum(jnp.sin(m(x)[0]))))(moe)
    for leaf in jax.tree.leaves(gradient.experts):
        largest = np.max(np.abs(leaf), axis=(1, 2))
        assert ((largest > 0) == (np.asarray(bias) > 0)).all()
