"""The optimizer: known values of its schedule, of one update, of clipping, and which parameters decay."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recipes import OptimizerConfig, Placement, make_optimizer, place
from recipes.optim import SCHEDULES, decays, make_schedule
from tests import helpers
from tests.recipes.common import abstract, lenient, model
from zoo.checks import ConfigError

PLAIN = OptimizerConfig(learning_rate=0.1, schedule="constant", weight_decay=0.0, clip_norm=None)


def rates(config: OptimizerConfig, steps: int, at: list[int]) -> list[float]:
    schedule = make_schedule(config, steps)
    return [float(schedule(step)) for step in at]


def test_warmup_rises_linearly_to_the_peak_and_a_cosine_falls_to_the_end():
    config = OptimizerConfig(learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.2)
    # 10 steps of warmup; half-way between step 10 and step 100 the cosine is at the mean of peak and end.
    expected = {0: 0.1, 5: 0.55, 10: 1.0, 55: 0.6, 100: 0.2, 1000: 0.2}
    assert rates(config, 100, list(expected)) == pytest.approx(list(expected.values()), rel=helpers.FLOAT32)
    falling = rates(config, 100, list(range(10, 101)))
    assert all(a > b for a, b in pairwise(falling))


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_short_runs_have_a_schedule(schedule: str, steps: int):
    config = OptimizerConfig(learning_rate=2e-5, schedule=schedule)
    found = rates(config, steps, list(range(steps)))
    assert found[0] == pytest.approx(2e-5, rel=helpers.FLOAT32)  # warmup is one step: the first is the peak
    assert all(0 < rate <= 2e-5 * (1 + helpers.FLOAT32) for rate in found)


def test_warmup_stable_decay_rises_stays_and_falls_linearly():
    fractions: dict[str, Any] = {"warmup_fraction": 0.1, "decay_fraction": 0.25, "final_fraction": 0.2}
    config = OptimizerConfig(learning_rate=1.0, schedule="warmup_stable_decay", **fractions)
    # 10 steps of warmup, the fall from step 75 to step 100; at 85 it has gone two fifths of the way from 1 to 0.2.
    expected = {0: 0.1, 5: 0.55, 10: 1.0, 40: 1.0, 75: 1.0, 85: 0.68, 99: 0.232, 100: 0.2, 1000: 0.2}
    assert rates(config, 100, list(expected)) == pytest.approx(list(expected.values()), rel=helpers.FLOAT32)


def test_what_is_not_said_of_a_schedule_is_its_default():
    config = OptimizerConfig(learning_rate=1.0, schedule="warmup_stable_decay")
    expected = {0: 0.1, 10: 1.0, 80: 1.0, 90: 0.55, 100: 0.1}  # a tenth, a fifth, to a tenth
    assert rates(config, 100, list(expected)) == pytest.approx(list(expected.values()), rel=helpers.FLOAT32)


def test_a_constant_schedule_is_constant_after_a_warmup_that_is_asked_for():
    assert rates(OptimizerConfig(learning_rate=1e-4, schedule="constant"), 10, [0, 5, 10, 99]) == [1e-4] * 4
    warm = OptimizerConfig(learning_rate=1.0, schedule="constant", warmup_fraction=0.4)
    expected = {0: 0.25, 2: 0.625, 4: 1.0, 9: 1.0}
    assert rates(warm, 10, list(expected)) == pytest.approx(list(expected.values()), rel=helpers.FLOAT32)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"learning_rate": 0.0}, r"optimizer\.learning_rate=0\.0: must be above zero"),
    "schedule": ({"schedule": "constnt"}, r"(?s)optimizer\.schedule=constnt: .*did you mean constant"),
    "warmup": ({"warmup_fraction": 1.5}, r"optimizer\.warmup_fraction=1\.5: must be between 0 and 1"),
    "no decay": ({"decay_fraction": 0.2}, r"(?s)optimizer\.decay_fraction=0\.2: has no effect on .*warmup_cosine"),
    "no end": ({"schedule": "constant", "final_fraction": 0.1}, r"optimizer\.final_fraction=0\.1: has no effect"),
    "overlap": ({"schedule": "warmup_stable_decay", "decay_fraction": 0.95}, r"optimizer\.decay_fraction=0\.95: with"),
    "beta": ({"beta2": -0.1}, r"optimizer\.beta2=-0\.1: must be between 0 and 1"),
    "decay": ({"weight_decay": -1.0}, r"optimizer\.weight_decay=-1\.0: must not be negative"),
    "moments": ({"moment_dtype": "float8"}, r"optimizer\.moment_dtype=float8: is not one of"),
    "clip": ({"clip_norm": 0.0}, r"optimizer\.clip_norm=0\.0: must be above zero"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**fields)


def update(config: OptimizerConfig, params: Any, gradients: Any, mask: Any = None) -> tuple[Any, Any]:
    """The first update of an optimizer, and its state after it."""
    optimizer = lenient(make_optimizer(config, 10, mask))
    return optimizer.update(gradients, optimizer.init(params), params)


def test_the_first_update_of_adam_is_the_sign_of_the_gradient():
    gradients = {"a": jnp.array([3.0, -0.5]), "b": jnp.array([0.0])}
    updates, _ = update(PLAIN, jax.tree.map(jnp.ones_like, gradients), gradients)
    helpers.assert_close(updates, {"a": np.array([-0.1, 0.1]), "b": np.array([0.0])}, helpers.FLOAT32)


def test_two_updates_follow_the_formula():
    config = OptimizerConfig(learning_rate=0.1, schedule="constant", beta1=0.9, beta2=0.8, eps=1e-3, clip_norm=None)
    optimizer = lenient(make_optimizer(config, 10, True))
    params, gradients = jnp.array([2.0]), (jnp.array([4.0]), jnp.array([-1.0]))
    state, m, v, x = optimizer.init(params), 0.0, 0.0, 2.0
    for step, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        g = float(gradient[0])
        m, v = 0.9 * m + 0.1 * g, 0.8 * v + 0.2 * g * g
        x -= 0.1 * (m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.8**step)) + 1e-3) + 0.1 * x)
    helpers.assert_close(params, np.array([x]), helpers.FLOAT32)


def first_moment(config: OptimizerConfig, gradients: Any) -> Any:
    """What Adam saw of the gradients: its first moment is a tenth of them after one step."""
    _, state = update(config, jax.tree.map(jnp.ones_like, gradients), gradients)
    return jax.tree.map(lambda mu: mu / (1 - config.beta1), optax.tree.get(state, "mu"))


def test_clipping_scales_all_gradients_by_the_global_norm():
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}  # norm 5
    halved = jax.tree.map(lambda g: np.asarray(g) / 2, gradients)
    helpers.assert_close(first_moment(OptimizerConfig(clip_norm=2.5), gradients), halved, helpers.FLOAT32)
    for config in (OptimizerConfig(clip_norm=5.1), OptimizerConfig(clip_norm=None)):
        helpers.assert_close(first_moment(config, gradients), helpers.host(gradients), helpers.FLOAT32)


def test_the_state_holds_the_learning_rate_of_the_step_done():
    config = OptimizerConfig(learning_rate=1.0, warmup_fraction=0.5, clip_norm=None)
    gradients = jnp.array([1.0])
    _, state = update(config, gradients, gradients)
    rate = state[-1].hyperparams["learning_rate"]
    assert float(rate) == pytest.approx(0.2, rel=helpers.FLOAT32)  # the first of five steps of warmup


def matrices(tree: Any) -> set[str]:
    """Paths of the leaves that decay."""
    marks = jax.tree.leaves_with_path(decays(tree))
    return {jax.tree_util.keystr(path) for path, mark in marks if mark}


@pytest.mark.parametrize("name", ["llama_tied", "deepseek_nine_experts"])
def test_matrices_decay_and_norms_and_embeddings_do_not(name: str):
    tree = abstract(name)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
    kept = {path for path in paths if "norm" in path or "embedding" in path}
    assert any("kv_norm" in path or "mlp_norm" in path for path in kept)
    assert ".embedding.weight" in kept
    buffers = {path for path in paths if "router.bias" in path}  # no parameter: split off before the optimizer
    assert matrices(tree) - buffers == paths - kept - buffers
    placed = place(tree, Placement(layers={"1": {"attn_query": "host"}}))
    assert not any("norm" in path or "embedding" in path for path in matrices(placed))
    assert len(matrices(placed)) > 10


def test_decay_shrinks_what_decays_and_nothing_else():
    params = model("llama_tied")
    config = OptimizerConfig(learning_rate=0.5, schedule="constant", weight_decay=0.1)
    updates, _ = update(config, params, jax.tree.map(np.zeros_like, params))
    block, change = params.layers.blocks[0], updates.layers.blocks[0]
    helpers.assert_close(change.mlp.up_proj.weight, -0.05 * block.mlp.up_proj.weight, helpers.FLOAT32)
    for leaf in (change.attention_norm.weight, change.mlp_norm.weight, updates.norm.weight, updates.embedding.weight):
        assert not np.asarray(leaf).any()


def test_a_mask_of_ones_own_replaces_the_default():
    params = {"a": jnp.array([1.0]), "b": jnp.array([1.0])}
    config = OptimizerConfig(learning_rate=1.0, schedule="constant", weight_decay=0.5)
    expected = {"a": np.array([-0.5]), "b": np.array([0.0])}
    for mask in ({"a": True, "b": False}, lambda params: {name: name == "a" for name in params}):
        updates, _ = update(config, params, jax.tree.map(jnp.zeros_like, params), mask)
        helpers.assert_close(updates, expected, helpers.FLOAT32)


def test_narrow_moments_are_the_wide_ones_rounded():
    """The first update is computed in float32 and equals the wide one's to the bit; only what is stored is rounded."""
    params = {"w": jnp.asarray(helpers.normal(0, 4, 3))}
    gradients = {"w": jnp.asarray(helpers.normal(1, 4, 3))}

    def first(dtype: str) -> tuple[Any, Any]:
        optimizer = lenient(make_optimizer(OptimizerConfig(moment_dtype=dtype), 10, decay_mask=False))
        return optimizer.update(gradients, optimizer.init(params), params)

    (updates, state), (wide_updates, wide_state) = first("bfloat16"), first("float32")
    helpers.assert_bit_equal(updates, wide_updates)
    for name in ("mu", "nu"):
        (narrow,), (wide,) = (optax.tree.get_all_with_path(s, name) for s in (state, wide_state))
        helpers.assert_bit_equal(narrow[1], helpers.cast(wide[1], jnp.bfloat16))
