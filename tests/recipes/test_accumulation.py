"""Micro-batches: the sum of their gradients, the loss and the norm reported are those of the full batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import recipes
from recipes import OptimizerConfig, Placement, make_optimizer, make_train_step, place, unplace
from recipes.verify.equivalence import SAMPLES, value_and_gradient
from tests import helpers
from tests.recipes.common import lenient, model

PLACES = ["device", "host"]
# One layer each (case 3); the experts' statistics are summed too.
NAMES = ["llama_one_layer", "deepseek_nine_experts"]
ONE_LAYER = {"llama_one_layer": {}, "deepseek_nine_experts": {"num_layers": 1, "num_dense_layers": 0}}
BATCH, SEQ = 8, 6


def loss(model: Any, batch: Any) -> Any:
    return recipes.next_token_loss(model, batch, balance=0.1, z_loss=1e-2, chunk=4)


def batch(name: str, mask: str, seed: int = 0) -> dict[str, Any]:
    """Eight sequences; under `unequal` the micro-batches have 12, 12, 6 and 3 targets."""
    shape = (BATCH, SEQ + 1)
    tokens = np.random.default_rng(seed).integers(0, SAMPLES[name].config.vocab_size, shape, np.int32)
    weights = np.ones(shape, bool)
    if mask == "unequal":
        for sequence in range(BATCH):
            weights[sequence, 1 + (9, 6, 3, 1)[sequence % 4] :] = False
        weights[3, 3] = True
    return {"tokens": tokens, "loss_mask": weights}


def keep_gradient() -> optax.GradientTransformation:
    """An optimizer that changes nothing and keeps the gradient that it is given as its state."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformation(init, update)


@functools.cache
def stepper(name: str, where: str, accumulate: int) -> Any:
    """`batch -> (gradient, metrics)` of one step, compiled once."""
    step = make_train_step(keep_gradient(), loss, accumulate)

    def run(data: Any) -> tuple[Any, dict[str, np.ndarray]]:
        placed = jax.tree.map(jnp.asarray, place(model(name, **ONE_LAYER[name]), Placement(default=where)))
        state, metrics = step(recipes.init_state(placed, keep_gradient()), data)
        return unplace(helpers.host(state.opt_state)), helpers.host(metrics)

    return run


@functools.cache
def expected(name: str, mask: str) -> Any:
    """Mean loss and its gradient of the full batch by the canonical model, without a train step."""

    def mean(model: Any, data: Any) -> jax.Array:
        result = loss(model, data)
        return result.total / result.weight

    return value_and_gradient(
        mean, model(name, **ONE_LAYER[name]), batch(name, mask), options={"xla_backend_optimization_level": 0}
    )


def test_unequal_masks_are_unequal():
    weights = batch(NAMES[0], "unequal")["loss_mask"][:, 1:].reshape(-1, 4, SEQ)
    assert weights.sum((0, 2)).tolist() == [12, 12, 6, 3]


@pytest.mark.parametrize("mask", ["equal", "unequal"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_four_micro_batches_are_the_full_batch(name: str, where: str, mask: str):
    """Cases 2 and 3."""
    total, gradient = expected(name, mask)
    found, metrics = stepper(name, where, 4)(batch(name, mask))
    helpers.assert_close(found, gradient, helpers.FLOAT32_MODEL)
    norm = float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradient))))
    assert norm > 0.1
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=helpers.FLOAT32_MODEL)
    reported = float(metrics["loss"])
    if "balance_loss" in metrics:
        reported += 0.1 * float(metrics["balance_loss"])
    assert reported <= float(total)  # the z-loss is not reported
    whole, whole_metrics = stepper(name, "device", 1)(batch(name, mask))
    helpers.assert_close(whole, gradient, helpers.FLOAT32_MODEL)
    assert metrics.keys() == whole_metrics.keys()
    for key in metrics:
        assert float(metrics[key]) == pytest.approx(float(whole_metrics[key]), rel=helpers.FLOAT32_MODEL), key


@pytest.mark.parametrize("name", NAMES)
def test_host_equals_device_bit_for_bit(name: str):
    for data in (batch(name, "equal"), batch(name, "unequal")):
        device, host = (stepper(name, where, 4)(data) for where in PLACES)
        helpers.assert_bit_equal(host, device)


@functools.cache
def training(where: str) -> list[Any]:
    """Parameters after each of three steps of AdamW on the same data, one layer, four micro-batches."""
    name = "llama_one_layer"
    optimizer = lenient(make_optimizer(OptimizerConfig(learning_rate=1e-2), 3))
    step = make_train_step(optimizer, loss, 4)
    placed = jax.tree.map(jnp.asarray, place(model(name, **ONE_LAYER[name]), Placement(default=where)))
    state = recipes.init_state(placed, optimizer)
    states = []
    for _ in range(3):
        state, metrics = step(state, batch(name, "unequal"))
        states.append(unplace(jax.tree.map(np.array, (state.params, metrics))))
    return states


def test_every_step_on_the_same_data_equals_that_of_the_device():
    """Case 3: the first step included; each one moves."""
    device, host = training("device"), training("host")
    helpers.assert_bit_equal(host, device)
    grad_norms = [metrics["grad_norm"] for _, metrics in host]
    assert len(set(map(float, grad_norms))) == 3
    assert all(norm > 0 for norm in grad_norms)


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_sequences_belong_to_micro_batches_in_turn(accumulate: int):
    """Sequence `i` to micro-batch `i % accumulate`: each device of a sharded batch keeps its own."""

    def squared(params: Any, data: Any) -> recipes.Loss:
        number = jnp.square(jnp.sum(data["tokens"])).astype(jnp.float32)
        return recipes.Loss(params["w"] * number, jnp.float32(1))

    step = make_train_step(keep_gradient(), squared, accumulate)
    tokens: Any = np.array([1, 2, 4, 7, 11, 16, 22, 29], np.int32)  # no two ways to share these give equal squares
    state, metrics = step(recipes.init_state({"w": jnp.float32(2)}, keep_gradient()), {"tokens": tokens[:, None]})
    mean = sum(int(tokens[turn::accumulate].sum()) ** 2 for turn in range(accumulate)) / accumulate
    assert float(state.opt_state["w"]) == mean
    assert float(metrics["loss"]) == 2 * mean
    assert float(metrics["grad_norm"]) == mean
