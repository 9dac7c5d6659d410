"""States on the host: bit for bit the numbers of the same step with all of the state on the device; kinds of memory."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recipes import MeshConfig, OptimizerConfig, Placement, make_optimizer, unplace
from recipes.config import Config
from recipes.placement.segments import ON_DEVICE, replace_places, replace_state
from recipes.placement.state import StatePlacement
from recipes.setup import Setup
from recipes.step.state import TrainState, places_of, settled_state
from tests import helpers
from tests.recipes.test_gradients import config
from zoo.deepseek.config import DeepSeekConfig, RouterConfig
from zoo.llama.config import LlamaConfig
from zoo.paths import flat

pytestmark = pytest.mark.usefixtures("usual_machine_code")

LLAMA = LlamaConfig(
    vocab_size=16, dim=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=24, tied_embeddings=True
)
DEEPSEEK = DeepSeekConfig(
    vocab_size=16,
    dim=8,
    num_layers=2,
    num_dense_layers=1,
    num_heads=2,
    query_rank=4,
    kv_rank=4,
    nope_head_dim=2,
    rope_head_dim=2,
    value_head_dim=4,
    mlp_dim=8,
    expert_dim=4,
    num_experts=4,
    experts_per_token=2,
    num_shared_experts=1,
    router=RouterConfig(groups=2, groups_kept=1),
)
WITH_MTP = dataclasses.replace(DEEPSEEK, num_mtp_layers=1)
STEPS = 20
ALL = dict.fromkeys(("params", "master", "gradients", "optimizer"), "host")
SOME = {
    "params": {"experts": "host", "embeddings": "host"},
    "master": {"default": "host", "norms": "device"},
    "optimizer": {"mu": {"experts": "host"}, "nu": "host"},
    "layers": {"1": {"params": "host", "optimizer": "device"}},
}
BF16 = {"dtype": "bfloat16", "router_bias_rate": 1e-2}
MOMENTUM = optax.sgd(0.1, momentum=0.9)
FREEZE = ("layers.blocks.0.attention.*", "embedding.*")


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of `STEPS` steps; `optimizer` None is AdamW as recipes make it, with clipping."""

    model: Any = LLAMA
    state: Any = dataclasses.field(default_factory=lambda: ALL)
    activations: str = "remat"
    fsdp: int = 1
    zero: int = 3
    optimizer: Any = None
    train: Any = dataclasses.field(default_factory=dict)


CASES = {
    "one device": Case(),
    "one device, accumulation": Case(activations="host", train={"accumulate": 4}),
    "eight devices": Case(fsdp=8, train={"dtype": "bfloat16"}),
    "eight devices, accumulation": Case(fsdp=8, activations="host", train={"accumulate": 4}),
    "eight devices, zero 1": Case(fsdp=8, zero=1, train={"dtype": "bfloat16"}),
    "eight devices, zero 2": Case(fsdp=8, zero=2, train={"accumulate": 2}),
    "lion": Case(optimizer=optax.lion(1e-2), state={"params": "host", "optimizer": "host"}),
    "momentum, frozen": Case(optimizer=MOMENTUM, train={"freeze": FREEZE}),
    "deepseek, all": Case(WITH_MTP, activations="host", train={**BF16, "accumulate": 2}),
    "deepseek, parts, moments and layers": Case(DEEPSEEK, SOME, train=BF16),
}


class Runs(NamedTuple):
    """The first state, and the last with all metrics, of the placed program and of its twin."""

    setup: Setup
    first: TrainState
    last: TrainState
    kinds: list[list[str]]  # of every array of the placed state, after the first step
    metrics: list[dict[str, np.ndarray]]
    twin: TrainState
    twin_metrics: list[dict[str, np.ndarray]]


def setup_of(case: Case) -> Setup:
    sizes = {"batch_size": 8 * case.train.get("accumulate", 1), "steps": STEPS, **case.train}
    placement = Placement(default=case.activations, state=StatePlacement(**case.state))
    found: Config = dataclasses.replace(
        config(case.model, placement, **sizes), mesh=MeshConfig(fsdp=case.fsdp, zero=case.zero)
    )
    setup = Setup(found)
    setup.optimizer = case.optimizer or make_optimizer(OptimizerConfig(learning_rate=1e-2), STEPS)
    return setup


def batches(setup: Setup) -> list[dict[str, Any]]:
    """The tokens of two sets, in turn."""
    leaf = setup.abstract_batch()["tokens"]
    drawn = (np.random.default_rng(seed).integers(0, 16, leaf.shape, np.int32) for seed in (0, 1))
    return [{"tokens": jax.device_put(tokens, leaf.sharding)} for tokens in drawn]


def on_device(tree: Any) -> Any:
    """The twin: host places turned to device, of activations and of the state."""
    twin = replace_state(replace_places(tree, lambda place: "device" if place == "host" else place), ON_DEVICE)
    return settled_state(twin)


def kinds(state: TrainState) -> list[str]:
    return ["device" if x.sharding.memory_kind == "device" else "host" for x in jax.tree.leaves(state)]


@functools.cache
def runs(name: str) -> Runs:
    setup = setup_of(CASES[name])
    first = setup.drawn_state()
    copied = jax.tree.map(jnp.copy, first)
    data = batches(setup)
    found, seen = [], []
    for state in (copied, on_device(jax.tree.map(jnp.copy, first))):
        metrics = []
        for number in range(STEPS):
            state, each = setup.step(state, data[number % 2])
            metrics.append(helpers.host(each))
            if number == 0:
                seen.append(kinds(state))
        found += [state, metrics]
    return Runs(setup, first, found[0], seen, found[1], found[2], found[3])


# Between them every kind of state, a mesh and accumulation.
QUICK = ("one device", "eight devices, accumulation", "deepseek, parts, moments and layers")


@pytest.mark.parametrize("name", CASES if helpers.LONG else QUICK)
def test_twenty_steps_equal_those_with_all_on_the_device(name: str):
    """Cases 2, 3 and 18: micro-batches, the first step included, tied embeddings; the norm that is reported too."""
    run = runs(name)
    helpers.assert_bit_equal(run.metrics, run.twin_metrics)
    helpers.assert_bit_equal(helpers.host(unplace(run.last)), helpers.host(unplace(run.twin)))
    assert float(run.metrics[-1]["loss"]) < float(run.metrics[0]["loss"])
    assert all(each["skipped"] == 0 for each in run.metrics)


@pytest.mark.parametrize("name", CASES if helpers.LONG else QUICK)
def test_kinds_of_memory(name: str):
    """Case 17: as asked of the first state, after a step, and after twenty; all of the twin on the device."""
    run = runs(name)
    asked = places_of(run.first)
    assert "host" in asked
    assert kinds(run.first) == run.kinds[0] == kinds(run.last) == asked
    assert set(run.kinds[1]) == {"device"}


def test_kinds_of_memory_after_taking_the_model_apart_and_placing_it_again():
    run = runs("one device")
    canonical = unplace(jax.tree.map(jnp.copy, run.last.params))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(canonical)} == {"pinned_host"}
    again = run.setup.place(canonical)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(again)} == {"pinned_host"}
    helpers.assert_bit_equal(helpers.host(again), helpers.host(run.last.params))


def test_a_loss_that_is_not_finite_changes_nothing_but_counters():
    """One parameter and its master are not a number: gradients are not either."""
    run = runs("deepseek, parts, moments and layers")
    state = jax.tree.map(jnp.copy, run.first)
    broken = eqx.tree_at(lambda state: [state.params.norm.weight, state.master.norm.weight], state, replace_fn=_nan)
    before = helpers.host(broken)
    after, metrics = run.setup.step(broken, batches(run.setup)[0])
    assert float(metrics["skipped"]) == 1
    after = helpers.host(after)
    for part in ("params", "master", "opt_state"):
        old, new = flat(getattr(before, part)), flat(getattr(after, part))
        for name, value in old.items():
            assert value.tobytes() == new[name].tobytes(), name


def _nan(leaf: Any) -> Any:
    return jnp.full_like(leaf, jnp.nan)
