"""The train step: what moves which parameters, in which dtype, and what it reports."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import recipes
from layers import MoEBlock, MoEStats
from layers.buffer import split_buffers
from recipes import Loss, OptimizerConfig, Placement, TrainState, make_optimizer, make_train_step, place, unplace
from recipes.step.train import _metrics, _move_router_biases
from recipes.verify.equivalence import SAMPLES
from tests import helpers
from tests.recipes.common import abstract, batch, lenient, model

NAME = "deepseek_nine_experts"
# Layers of each dtype's model: a dense one, two MoE ones in one run and one in another; one MoE layer.
LAYERS = {"float32": {"num_layers": 4}, "bfloat16": {"num_layers": 1, "num_dense_layers": 0}}
RATE = 0.125  # a power of two: sums of its multiples are exact
STEPS = 20
MIXED = Placement(activations={"attn_query": "host", "moe_gate": "device"}, layers={"last": {"moe_up": "host"}})
ADAM = OptimizerConfig(learning_rate=3e-2, schedule="constant", weight_decay=0.1)


def placed_model(dtype: str) -> Any:
    return jax.tree.map(jnp.asarray, place(model(NAME, **LAYERS[dtype]), MIXED))


def counting_loss(model: Any, batch: Any) -> Loss:
    """A loss of one's own: the package's, plus what fell on the experts of each layer."""
    loss = recipes.next_token_loss(model, batch, balance=0.1)
    assert loss.stats is not None
    counts = loss.stats.counts.astype(jnp.float32)
    choices = {f"choices_{layer}": jnp.sum(counts[layer]) for layer in range(counts.shape[0])}
    return Loss(loss.total, loss.weight, loss.metrics | choices, loss.stats)


def snapshot(state: TrainState) -> TrainState:
    """The canonical state, copied: a view of an array would keep it from being donated."""
    return unplace(jax.tree.map(np.array, state))


@functools.cache
def history(dtype: str) -> tuple[list[TrainState], list[dict[str, float]]]:
    """States before and after each of 20 steps on one batch, canonical and as NumPy arrays, and the metrics."""
    optimizer = lenient(make_optimizer(ADAM, STEPS))
    step: Any = make_train_step(optimizer, counting_loss, router_bias_rate=RATE)
    state = recipes.init_state(placed_model(dtype), optimizer, jnp.dtype(dtype))
    states, metrics = [snapshot(state)], []
    for _ in range(STEPS if dtype == "float32" else 3):
        old = jax.tree.leaves((state.params, state.master, state.opt_state[:2]))
        state, reported = step(state, batch(NAME))
        assert all(leaf.is_deleted() for leaf in old)  # donated; the old learning rate is not read, hence not taken
        states.append(snapshot(state))
        metrics.append({name: float(value) for name, value in reported.items()})
    assert step._cache_size() == 1  # compiled once, though its own results come back to it
    return states, metrics


def moe_blocks(model: Any) -> list[MoEBlock]:
    return [block for block in model.layers.blocks if isinstance(block, MoEBlock)]


def biases(model: Any) -> list[Any]:
    """Of each MoE layer."""
    return [None if bias is None else bias.value for bias in (block.moe.router.bias for block in moe_blocks(model))]


@functools.cache
def forward() -> Callable[[Any, Any], Any]:
    """The canonical model's statistics, with no gradient and no placement."""
    return helpers.jit(lambda model, batch: recipes.next_token_loss(model, batch))


def test_the_loss_of_a_batch_that_is_repeated_falls():
    losses = [metrics["loss"] for metrics in history("float32")[1]]
    assert losses[-1] < 0.5 * losses[0]
    assert losses[0] == pytest.approx(float(np.log(11)), rel=1.0)  # the order of a uniform guess


def test_the_first_metrics_are_those_of_the_model_before_the_step():
    (state, *_), (metrics, *_) = history("float32")
    loss = forward()(state.params, batch(NAME))
    assert metrics["loss"] == pytest.approx(float(loss.total / loss.weight), rel=helpers.FLOAT32_MODEL)
    balance = float(loss.metrics["balance_loss"] / loss.weight)
    assert metrics["balance_loss"] == pytest.approx(balance, rel=helpers.FLOAT32_MODEL)
    counts = np.asarray(loss.stats.counts)
    assert metrics["expert_load"] == pytest.approx(float((counts.max(1) / counts.mean(1)).max()))
    assert metrics["learning_rate"] == pytest.approx(3e-2)
    assert metrics["dropped"] == 0


def test_the_share_of_dropped_choices_is_that_of_all_layers():
    stats = MoEStats(jnp.array([[6, 2], [4, 4]], jnp.int32), jnp.array([3, 1], jnp.int32), jnp.zeros((2, 1)))
    loss = Loss(jnp.ones(()), jnp.ones(()), {}, stats)
    assert float(_metrics(loss, jnp.ones(()), jnp.bool_(True), ())["dropped"]) == 4 / 16


def test_remat_does_not_count_choices_twice():
    """Tokens times experts a token, for each layer, whatever the backward pass recomputes."""
    (state, *_), (metrics, *_) = history("float32")
    sample = SAMPLES[NAME]
    choices = sample.batch_size * sample.sequence_length * 2
    weight = float(forward()(state.params, batch(NAME)).weight)
    for layer in range(3):
        assert metrics[f"choices_{layer}"] * weight == pytest.approx(choices)
    assert "choices_3" not in metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_routing_bias_moves_by_the_rate_towards_an_even_load(dtype: str):
    """Case 11: exactly rate * sign(mean - load), so neither decay nor moments touch it."""
    states, _ = history(dtype)
    for before, after in pairwise(states[:4]):
        load = np.asarray(forward()(before.params, batch(NAME)).stats.counts, np.float32)
        assert load.shape == ({"float32": 3, "bfloat16": 1}[dtype], 9)
        assert (load == 0).any(), "no idle expert: a weaker test"
        moves = RATE * np.sign(load.mean(1, keepdims=True) - load)
        for old, new, move in zip(biases(before.params), biases(after.params), moves, strict=True):
            assert old.dtype == new.dtype == np.float32
            np.testing.assert_array_equal(new, old + move)


def test_each_layer_of_a_pattern_moves_by_its_own_load():
    canonical = model(NAME, num_layers=4, num_dense_layers=0)
    grouped = place(canonical, Placement(layers={"0+2": {"attn_query": "host"}}, group=2))
    assert [len(run.blocks) for run in grouped.layers.runs] == [2]
    counts = np.random.default_rng(0).integers(0, 9, (4, 9), np.int32)
    expected, moved = (_move_router_biases(each, jnp.asarray(counts), RATE) for each in (canonical, grouped))
    helpers.assert_bit_equal(unplace(moved), expected)
    assert len({tuple(np.asarray(bias).tolist()) for bias in biases(expected)}) == 4


def test_without_a_rate_the_biases_stay():
    """And the step needs no statistics; the optimizer is any of optax."""
    optimizer = optax.sgd(1.0)
    state = recipes.init_state(placed_model("bfloat16"), optimizer)
    before = snapshot(state)
    after, metrics = make_train_step(optimizer, counting_loss)(state, batch(NAME))
    after = snapshot(after)
    helpers.assert_bit_equal(biases(after.params), biases(before.params))
    change = jax.tree.map(lambda a, b: a - b, split_buffers(after.params)[0], split_buffers(before.params)[0])
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(change)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e2 * helpers.FLOAT32)  # differences of rounded sums
    assert "learning_rate" not in metrics


def test_the_state_keeps_no_moments_and_no_master_of_the_biases():
    for dtype in ("float32", "bfloat16"):
        state = history(dtype)[0][-1]
        for tree in (optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")):
            assert set(biases(tree)) == {None}
        if state.master is not None:
            assert set(biases(state.master)) == {None}


def test_bfloat16_parameters_are_the_rounded_masters_after_each_step():
    states, _ = history("bfloat16")
    for before, after in pairwise(states):
        params, buffers = split_buffers(after.params)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
        assert {leaf.dtype for leaf in jax.tree.leaves(buffers)} == {np.dtype(np.float32)}
        assert {leaf.dtype for leaf in jax.tree.leaves(after.master)} == {np.dtype(np.float32)}
        helpers.assert_bit_equal(params, helpers.host(helpers.cast(after.master, jnp.bfloat16)))
        moved = [np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (before.master, after.master)), strict=True)]
        assert all(moved)


def test_float32_parameters_are_their_own_masters():
    states, _ = history("float32")
    assert all(state.master is None for state in states)
    assert {leaf.dtype for leaf in jax.tree.leaves(states[-1].params)} == {np.dtype(np.float32)}


def test_the_first_bfloat16_loss_is_near_that_of_the_masters():
    (state, *_), (metrics, *_) = history("bfloat16")
    wide = forward()(eqx.combine(state.master, state.params), batch(NAME))
    assert metrics["loss"] == pytest.approx(float(wide.total / wide.weight), rel=helpers.BFLOAT16)


def test_steps_and_sequences_are_counted():
    for dtype in ("float32", "bfloat16"):
        for number, state in enumerate(history(dtype)[0]):
            assert int(state.step) == number
            assert int(state.cursor) == number * SAMPLES[NAME].batch_size
            assert state.step.dtype == state.cursor.dtype == np.int32


def test_tied_embeddings_are_one_leaf_of_the_state():
    """Case 18; a leaf that stood twice would be donated twice, which fails."""
    tied, optimizer = "llama_tied", lenient(make_optimizer(ADAM, STEPS))
    placed = jax.tree.map(jnp.asarray, place(model(tied, num_layers=1), Placement()))
    state = recipes.init_state(placed, optimizer)
    vocab_by_dim = [leaf.shape for leaf in jax.tree.leaves(state) if 11 in leaf.shape]
    assert vocab_by_dim == [(11, 8)] * 3  # parameter and two moments
    before = np.array(placed.embedding.weight)
    state, _ = make_train_step(optimizer)(state, SAMPLES[tied].batch())
    assert state.params.head is None
    # The first step of Adam moves every entry whose gradient is not zero by the rate: rows of unseen tokens too, which
    # only the projection to logits reads.
    moved = np.abs(np.asarray(state.params.embedding.weight) - before)
    np.testing.assert_allclose(moved, ADAM.learning_rate, rtol=1e-2)


def test_a_step_closes_over_no_arrays():
    optimizer = lenient(make_optimizer(ADAM, STEPS))
    placed = place(abstract(NAME), MIXED)
    state = jax.eval_shape(lambda placed: recipes.init_state(placed, optimizer), placed)
    step = make_train_step(optimizer, counting_loss, router_bias_rate=RATE)
    program = jax.make_jaxpr(step)(state, SAMPLES[NAME].batch())
    inner = [equation.params["jaxpr"] for equation in program.jaxpr.eqns if "jaxpr" in equation.params]
    consts = [const for jaxpr in (program, *inner) for const in jaxpr.consts]
    assert max((np.size(const) for const in consts), default=0) <= 16


def test_a_canonical_model_trains_without_being_placed():
    """`init_state` takes it as it is: the same step, no segments."""
    optimizer = optax.sgd(0.1)
    canonical = jax.tree.map(jnp.asarray, model("llama_one_layer"))
    state = recipes.init_state(canonical, optimizer)
    before = snapshot(state).params
    state, _ = make_train_step(optimizer)(state, SAMPLES["llama_one_layer"].batch())
    moved = [np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (before, snapshot(state).params)), strict=True)]
    assert all(moved)
