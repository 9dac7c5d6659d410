"""The check of numbers: what differs is found, in whichever leaf, layer or expert, and what does not passes."""

import dataclasses
import json
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recipes.setup as setting
from recipes import MeshConfig, OptimizerConfig, Placement
from recipes.config import Config, RunConfig, TrainConfig
from recipes.data.config import DataConfig
from recipes.placement.segments import placed_stacks
from recipes.setup import Setup
from recipes.verify import check_functions, check_gradients, compare
from recipes.verify.shrink import num_rows, shrink
from tests import helpers
from tests.layers.test_experts import layer, random_choice
from zoo.checks import ConfigError
from zoo.llama.config import LlamaConfig
from zoo.registry import config as model_config

LLAMA = LlamaConfig(vocab_size=11, dim=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=12)
HOST = Placement(default="host")


def config(model: Any = LLAMA, placement: Placement = HOST, **train: Any) -> Config:
    sizes: dict[str, Any] = {"batch_size": 2, "sequence_length": 8, "steps": 4} | train
    return Config(
        model=model,
        placement=placement,
        explain=False,
        mesh=MeshConfig(),
        optimizer=OptimizerConfig(),
        data=DataConfig(source="synthetic"),
        train=TrainConfig(**sizes),
        run=RunConfig(dir="unused"),
    )


def test_equal_trees():
    tree = {"a": np.ones((2, 3)), "b": np.zeros(4)}
    found = compare(tree, tree)
    assert (found.ok, found.worst, found.worst_leaf) == (True, 0.0, "")


# What is done to a leaf `[1, 2, 4]` -> its relative difference and where.
CHANGES = {
    "by a quarter of the largest": ([1.0, 3.0, 4.0], 0.25, (1,)),
    "in the last bit": ([np.nextafter(1, 2), 2, 4], 2**-54, (0,)),
    "not a number": ([1, np.nan, 4], np.inf, (1,)),
    "infinite": ([1, 2, -np.inf], np.inf, (2,)),
}


@pytest.mark.parametrize(("changed", "worst", "where"), CHANGES.values(), ids=CHANGES)
def test_a_leaf_that_differs(changed: list[float], worst: float, where: tuple[int, ...]):
    same = np.ones((3, 3))
    found = compare({"a": same, "b": np.array(changed)}, {"a": same, "b": np.array([1.0, 2.0, 4.0])})
    assert (found.ok, found.worst, found.worst_leaf) == (False, worst, "b")
    assert found.leaves[0].where == where
    assert compare(np.array(changed), np.array([1.0, 2.0, 4.0]), tolerance=0.25).ok is (worst <= 0.25)


def test_zero_is_exactly_zero_and_signs_are_bits():
    assert compare(np.array([0.0, 1e-30]), np.zeros(2), tolerance=0.5).worst == np.inf
    assert not compare(np.array([-0.0]), np.array([0.0])).ok
    assert compare(np.array([-0.0]), np.array([0.0]), tolerance=1e-6).ok


def test_trees_that_do_not_correspond():
    known = {"a": np.ones(3), "b": np.ones(2)}
    narrow = {"a": np.ones(3, np.float32), "b": np.ones(2)}
    for other, match in (({"a": np.ones(3)}, "Expected 2 arrays"), ({**known, "b": np.ones(3)}, "b:"), (narrow, "a:")):
        with pytest.raises(ValueError, match=match):
            compare(other, known)


def expert_loss(experts: Any, *, stopped: int | None = None) -> Any:
    """A loss of 9 experts, one of which may get no gradient."""
    if stopped is not None:
        cut = jnp.arange(9) == stopped
        experts = jax.tree.map(lambda w: jnp.where(cut[:, None, None], jax.lax.stop_gradient(w), w), experts)
    x = jnp.asarray(helpers.normal(1, 13, 4), jnp.float32)
    weights, chosen = jnp.full((13, 3), 0.3, jnp.float32), jnp.asarray(random_choice(13, 3, 9))
    return jnp.sum(jnp.sin(experts(x, weights, chosen)[0]))


def test_a_gradient_zeroed_for_one_expert():
    """Case 6: the smallest of nine, which a figure over all of them would hide."""
    weights = layer(9)
    scale = jnp.where(jnp.arange(9) == 5, 1e-3, 1.0)[:, None, None].astype(jnp.float32)
    weights = eqx.tree_at(lambda experts: experts.down_proj, weights, weights.down_proj * scale)
    right, wrong = jax.grad(expert_loss), jax.grad(partial(expert_loss, stopped=5))
    assert check_functions(right, right, weights).ok
    found = check_functions(wrong, right, weights)
    assert (found.ok, found.worst) == (False, 1.0)
    assert found.leaves[0].expert == 5
    assert found.worst_leaf.endswith("_proj, expert 5")
    gate = next(leaf for leaf in found.leaves if leaf.name == "gate_proj")
    assert gate.experts == tuple(float(expert == 5) for expert in range(9))
    assert gate.where[0] == 5


def stack(weights: Any, x: Any, *, swapped: bool) -> Any:
    """Four layers `sin(x @ w)`; their backward pass may read the residuals of layers 1 and 2 crosswise."""

    @jax.custom_vjp
    def run(weights, x):
        return forward(weights, x)[0]

    def forward(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), x), x, weights)

    def backward(kept, gradient):
        weights, inputs = kept
        inputs = inputs[jnp.array([0, 2, 1, 3])] if swapped else inputs

        def layer(gradient, each):
            w, x = each
            _, pull = jax.vjp(lambda w, x: jnp.sin(x @ w), w, x)
            return pull(gradient)[::-1]

        gradient, slopes = jax.lax.scan(layer, gradient, (weights, inputs), reverse=True)
        return slopes, gradient

    run.defvjp(lambda weights, x: (forward(weights, x)[0], (weights, forward(weights, x)[1])), backward)
    return jnp.sum(run(weights, x))


def test_a_gradient_of_one_layer_read_from_another():
    weights, x = (jnp.asarray(helpers.normal(seed, *dims), jnp.float32) for seed, dims in ((0, (4, 3, 3)), (1, (2, 3))))
    right, wrong = (jax.grad(partial(stack, swapped=swapped)) for swapped in (False, True))
    reference = jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]))
    assert check_functions(right, reference, weights, x, tolerance=helpers.FLOAT32).ok
    found = check_functions(wrong, reference, weights, x, tolerance=helpers.FLOAT32)
    assert not found.ok
    assert found.worst > 0.1
    assert found.leaves[0].where[0] != 3  # which comes first in the backward pass and is right


def test_the_very_step_of_a_run_and_one_whose_placement_changes_a_gradient(monkeypatch: pytest.MonkeyPatch):
    fast = {"xla_backend_optimization_level": 0}
    monkeypatch.setattr("recipes.step.train.compiler_options", lambda platform: fast)
    found = check_gradients(config(), steps=2)
    assert (found.ok, found.worst, found.worst_leaf) == (True, 0.0, "")
    names = {leaf.name for leaf in found.states[1].leaves}
    assert {"state.params.layers.blocks.1.mlp.up_proj.weight", "state.step", "state.cursor", "metrics.loss"} <= names
    assert any("mu" in name for name in names)
    right = setting.next_token_loss

    def wrong(model: Any, batch: Any, **options: Any) -> Any:
        loss = right(model, batch, **options)
        hosted = any("host" in dict(places).values() for run in placed_stacks(model)[0].runs for places in run.places)
        return dataclasses.replace(loss, total=loss.total + hosted * 1e-2 * jnp.sum(model.embedding.weight))

    monkeypatch.setattr(setting, "next_token_loss", wrong)
    found = check_gradients(config(), steps=1)
    assert (found.ok, found.worst_leaf) == (False, "gradients.embedding.weight")
    assert "! gradients: gradients.embedding.weight by" in str(found)
    assert max(map(len, str(found).splitlines())) <= 100
    read = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (read["ok"], read["worst_leaf"], read["twin"]["ok"]) == (False, "gradients.embedding.weight", False)


# Layers of a table with the rows 0-1, 2, 3-4+6-7, 5 -> the layers that stay.
KEPT = {4: [0, 2, 3, 5], 6: [0, 1, 2, 3, 4, 5], 7: [0, 1, 2, 3, 4, 5, 6], 8: list(range(8))}


@pytest.mark.parametrize(("layers", "kept"), KEPT.items())
def test_a_smaller_model_keeps_every_distinct_row(layers: int, kept: list[int]):
    model = model_config("debug_deepseek", num_layers=8, num_dense_layers=2, num_mtp_layers=1)
    placement = Placement(
        activations={"attn_query": "host"}, layers={"2+5": {"moe_gate": "host"}, "2": {"moe_up": "device"}}
    )
    whole = config(model, placement)
    table = Setup(whole).table
    small = shrink(whole, table, layers, 4)
    rows = Setup(small).table.rows()
    assert rows == [table.rows()[layer] for layer in (*kept, 8)]
    assert (num_rows(table, whole), small.train.sequence_length) == (4, 4)
    assert small.model.num_dense_layers == sum(layer < 2 for layer in kept)  # type: ignore[union-attr]


def test_what_cannot_be_shrunk():
    whole = config(placement=Placement(layers={"0": {"mlp_up": "host"}}))
    table = Setup(whole).table
    cases = ((1, None, "2 distinct rows"), (3, None, "between 1 and 2"), (None, 9, "between 1 and 8"))
    for layers, sequence, match in cases:
        with pytest.raises(ConfigError, match=match):
            shrink(whole, table, layers, sequence)
    with pytest.raises(ConfigError, match="freeze names layers"):
        shrink(dataclasses.replace(whole, train=TrainConfig(freeze=("layers.blocks.0",))), table, 1)
