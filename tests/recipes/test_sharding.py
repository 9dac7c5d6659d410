"""On eight devices: the numbers of one, every array in parts, and meshes that cannot be are refused."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import recipes
import zoo
from layers.axes import logical_axes
from recipes import MeshConfig, OptimizerConfig, Placement, make_mesh, make_optimizer, place, unplace
from recipes.placement.segments import rest_at_use
from recipes.placement.spec import PLACES
from recipes.sharding.rules import RULES, RULES_AT_USE, constrain, constrain_batch, shardings
from recipes.step.loss import Loss, next_token_loss
from recipes.step.state import split_state
from tests import helpers
from tests.recipes.common import BEARTYPE_DRAWS, lenient
from zoo.deepseek.config import DeepSeekConfig, RouterConfig
from zoo.llama.config import LlamaConfig
from zoo.models import INIT_OPTIONS
from zoo.paths import flat
from zoo.source import ModelSource, fill

LLAMA = LlamaConfig(
    vocab_size=16, dim=16, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=2, mlp_dim=8, tied_embeddings=True
)
DEEPSEEK = DeepSeekConfig(
    vocab_size=16,
    dim=16,
    num_layers=2,
    num_dense_layers=1,
    num_heads=4,
    query_rank=8,
    kv_rank=16,
    nope_head_dim=3,
    rope_head_dim=2,
    value_head_dim=4,
    mlp_dim=8,
    expert_dim=8,
    num_experts=8,
    experts_per_token=2,
    num_shared_experts=1,
    num_mtp_layers=1,
    router=RouterConfig(groups=4, groups_kept=2),
)
CONFIGS = {"llama": LLAMA, "deepseek": DEEPSEEK}
PLACEMENTS = {
    "llama": Placement(activations={"attn_query": "host"}, layers={"0": {"attn_key": "device"}}),
    "deepseek": Placement(activations={"moe_gate": "host", "attn_query": "host", "moe_up": "device"}),
}
BOUND = 4.0  # as many as there are tokens for each choice: nothing can be dropped
MESHES = {
    "llama": [{"fsdp": 8}, {"tensor": 4, "replica": 2}, {"context": 2, "fsdp": 2, "tensor": 2}],
    "deepseek": [{"tensor": 2, "fsdp": 4}, {"tensor": 4, "context": 2}, {"expert": 2, "fsdp": 4}],
}
if helpers.LONG:
    MESHES["deepseek"] += [{"fsdp": 8}, {"expert": 8}, {"expert": 4, "tensor": 2}]
    MESHES["deepseek"] += [{"replica": 2, "expert": 2, "tensor": 2}]
CASES = [(name, mesh) for name, meshes in MESHES.items() for mesh in meshes]


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = rng.random((8, 5)) < 0.8
    return {"tokens": rng.integers(0, 16, (8, 5)).astype(np.int32), "loss_mask": mask}


def whole_loss(model: Any, batch: Any) -> Loss:
    return next_token_loss(model, batch, balance=0.1, z_loss=1e-2, mtp=0.3, chunk=3)


def model(name: str) -> Any:
    return helpers.host(helpers.drawn(lambda: zoo.abstract(CONFIGS[name]), std=0.5))


def gradients(
    name: str, mesh: Any, loss: Any = whole_loss, placement: Placement | None = None
) -> tuple[Any, dict[str, np.ndarray], Any]:
    """Loss, gradients by canonical path, and how many choices fell on each expert and were dropped."""
    placement = placement or PLACEMENTS[name]
    placed = place(jax.tree.map(jnp.asarray, model(name)), placement, mesh, expert_bound=BOUND)

    def on_mesh(model: Any, batch: Any) -> Any:
        return (rest_at_use(model, mesh), constrain_batch(batch, mesh)) if mesh is not None else (model, batch)

    @helpers.jit
    def run(model: Any, batch: Any) -> Any:
        def parts(model: Any) -> Any:
            result = loss(*on_mesh(model, batch))
            return result.total, result.stats

        (value, moe), gradient = jax.value_and_grad(parts, has_aux=True)(model)
        return value, constrain(gradient, mesh), None if moe is None else (moe.counts, moe.dropped)

    value, gradient, counts = run(placed, batch())
    return float(value), flat(unplace(helpers.host(gradient))), helpers.host(counts)


@functools.cache
def expected(name: str) -> Any:
    return gradients(name, None)


def assert_same(actual: Any, expected: Any) -> None:
    """Loss, and the largest difference of each leaf, each expert, and each row of MLA's latents and rope key."""
    helpers.assert_close(np.asarray(actual[0]), np.asarray(expected[0]), helpers.FLOAT32)
    assert actual[1].keys() == expected[1].keys()
    for path, leaf in expected[1].items():
        parts = zip(actual[1][path], leaf, strict=True) if ".experts." in path else [(actual[1][path], leaf)]
        for number, (part, wanted) in enumerate(parts):
            helpers.assert_close({f"{path} {number}": part}, {f"{path} {number}": wanted}, helpers.FLOAT32)
        if path.endswith(("kv_down.weight", "query_down.weight")):  # some rows are small beside the leaf
            for number, (part, wanted) in enumerate(zip(actual[1][path].T, leaf.T, strict=True)):
                helpers.assert_close({f"{path} {number}": part}, {f"{path} {number}": wanted}, helpers.FLOAT32_ROW)
    helpers.assert_bit_equal(actual[2], expected[2])


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_loss_gradients_and_choices_are_those_of_one_device(name: str, shape: dict[str, int]):
    assert_same(gradients(name, make_mesh(MeshConfig(**shape))), expected(name))


def test_the_comparison_sees_one_shards_contribution_doubled():
    def doubled(model: Any, batch: Any) -> Loss:
        weight = jnp.ones(8, jnp.float32).at[3].set(2.0)  # what the device with sequence 3 adds, twice
        mask = batch["loss_mask"].astype(jnp.float32) * jnp.broadcast_to(weight[:, None], batch["loss_mask"].shape)
        return whole_loss(model, {**batch, "loss_mask": mask})

    with pytest.raises(AssertionError, match="largest difference"):
        assert_same(gradients("llama", make_mesh(MeshConfig(fsdp=8)), doubled), expected("llama"))


def test_weights_are_drawn_into_their_parts_and_depend_on_no_mesh():
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    optimizer = lenient(make_optimizer(OptimizerConfig(), 10))

    def init(mesh: Any) -> Any:
        def draw(key: jax.Array) -> Any:
            placed = place(zoo.build(DEEPSEEK, key=key), PLACEMENTS["deepseek"], mesh)
            return constrain(recipes.init_state(placed, optimizer, jnp.bfloat16), mesh)

        return jax.jit(draw, compiler_options=INIT_OPTIONS)(jax.random.key(0))

    split, whole = init(mesh), init(None)
    helpers.assert_bit_equal(helpers.host(jax.tree.leaves(split)), helpers.host(jax.tree.leaves(whole)))
    assert_split(split, mesh)
    leaves = jax.tree.leaves(split)
    assert all(math.prod(leaf.sharding.shard_shape(leaf.shape)) < leaf.size for leaf in leaves if leaf.ndim > 2)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert held < sum(leaf.nbytes for leaf in leaves) / 8 * 1.8  # norms, routers' tensor axis, counters are whole


def test_weights_that_are_read_come_into_their_parts():
    original, mesh = zoo.build(DEEPSEEK, key=jax.random.key(0)), make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    split = shardings(original, mesh)
    read = fill(ModelSource(original), jnp.float32, split)
    helpers.assert_bit_equal(helpers.host(read), helpers.host(original))
    assert all(map(lambda leaf, sharding: leaf.sharding == sharding, jax.tree.leaves(read), jax.tree.leaves(split)))


def assert_split(state: Any, mesh: Any, zero: int = 3) -> None:
    split = shardings(state, mesh)
    split = dataclasses.replace(split, params=shardings(state.params, mesh, RULES if zero == 3 else RULES_AT_USE))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(split), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@functools.cache
def three_steps(shape: tuple[tuple[str, int], ...], zero: int) -> Any:
    """Metrics of whole train steps with accumulation, and the parameters after them; the state stays in its parts."""
    mesh = make_mesh(MeshConfig(**dict(shape))) if shape else None
    optimizer = lenient(make_optimizer(OptimizerConfig(learning_rate=1e-2, schedule="constant"), 3))
    placed = place(jax.tree.map(jnp.asarray, model("llama")), PLACEMENTS["llama"], mesh)
    state = split_state(recipes.init_state(placed, optimizer), mesh, zero)
    step: Any = recipes.make_train_step(optimizer, accumulate=2, mesh=mesh, zero=zero)
    metrics = []
    for _ in range(3):
        state, reported = step(state, batch())
        metrics.append(helpers.host(reported))
    if mesh is not None:
        assert_split(state, mesh, zero)
    return metrics, flat(unplace(helpers.host(state.params)))


@pytest.mark.parametrize("zero", [3, 2, 1] if helpers.LONG else [3])
def test_steps_on_a_mesh_are_those_of_one_device(zero: int):
    actual, wanted = three_steps((("fsdp", 4), ("tensor", 2)), zero), three_steps((), 3)
    helpers.assert_close(actual, wanted, helpers.FLOAT32_MODEL)


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    axes = draw(st.lists(st.sampled_from(["replica", "fsdp", "expert", "tensor"]), min_size=3, max_size=3))
    return {axis: 2 ** axes.count(axis) for axis in axes if axis != "tensor" or axes.count(axis) < 3}


@BEARTYPE_DRAWS
@settings(max_examples=30 if helpers.LONG else 2)
@given(
    name=st.sampled_from(sorted(CONFIGS) if helpers.LONG else ["llama"]),
    shape=meshes(),
    tags=st.dictionaries(st.sampled_from(["attn_query", "mlp_gate"]), st.sampled_from(PLACES)),
)
def test_random_meshes_and_placements_give_the_numbers_of_one_device(
    name: str, shape: dict[str, int], tags: dict[str, str]
):
    config = MeshConfig(**shape)
    mesh = make_mesh(config, jax.devices()[: config.num_devices])
    assert_same(gradients(name, mesh, placement=Placement(activations=tags)), expected(name))


@BEARTYPE_DRAWS
@settings(max_examples=30)
@given(shape=meshes(), name=st.sampled_from(sorted(CONFIGS)))
def test_every_array_with_axes_is_split_by_each_mesh_axis_of_theirs(shape: dict[str, int], name: str):
    config = MeshConfig(**shape)
    mesh = make_mesh(config, jax.devices()[: config.num_devices])
    canonical = zoo.abstract(CONFIGS[name])
    dims = dict(zip(flat(canonical), logical_axes(canonical), strict=True))
    for path, leaf in flat(constrain(canonical, mesh)).items():
        axes = [axis for dim in dims[path] if dim is not None for axis in RULES[dim]]
        parts = math.prod(leaf.shape) // math.prod(leaf.sharding.shard_shape(leaf.shape))
        assert parts == math.prod(mesh.shape[axis] for axis in axes), path
    placed = place(canonical, PLACEMENTS[name], mesh)
    assert all(leaf.sharding is not None for leaf in jax.tree.leaves(placed))


def test_all_axes_of_the_layers_have_a_rule():
    names = {name for config in CONFIGS.values() for dims in logical_axes(zoo.abstract(config)) for name in dims}
    assert names - {None} == RULES.keys()


def test_choices_beyond_the_bound_are_dropped_and_counted():
    """All tokens choose alike: of 8 devices each sends an expert one of its 4 tokens, whose mean load is 1."""
    config = zoo.config(DEEPSEEK, num_mtp_layers=0, router={"groups": 1, "groups_kept": 1, "selection_bias": False})
    mesh, model = make_mesh(MeshConfig(expert=8)), helpers.drawn(lambda: zoo.abstract(config), std=0.5)
    placed = place(jax.tree.map(jnp.asarray, model), Placement(), mesh, expert_bound=1.0)
    moe = helpers.jit(lambda model, tokens: model.forward(tokens).aux.moe)(placed, jnp.full((8, 4), 3, jnp.int32))
    assert moe.counts.sum() == 8 * 4 * 2
    assert np.asarray(moe.dropped).tolist() == [8 * (4 - 1) * 2]


def test_a_sample_on_a_mesh_is_that_of_one_device():
    """One sequence, which no mesh can split."""
    samples = []
    for mesh in (None, make_mesh(MeshConfig(expert=2, fsdp=2, context=2))):
        placed = place(jax.tree.map(jnp.asarray, model("deepseek")), PLACEMENTS["deepseek"], mesh)
        samples.append(np.asarray(helpers.jit(recipes.generate)(placed, jnp.asarray([3, 1, 2], jnp.int32), 4)))
    assert samples[0].tolist() == samples[1].tolist()


def test_unplace_takes_the_mesh_away():
    original = model("deepseek")
    placed = place(jax.tree.map(jnp.asarray, original), PLACEMENTS["deepseek"], make_mesh(MeshConfig(expert=4, fsdp=2)))
    assert jax.tree.structure(placed) != jax.tree.structure(original)
    helpers.assert_bit_equal(unplace(placed), original)
