"""What the jaxpr of a gradient saves is what was asked: which tags, where, in which layers, how many bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.ad_checkpoint import checkpoint_name

from recipes import Placement, place, policy, resolve
from recipes.placement.segments import replace_places
from recipes.verify.equivalence import SAMPLES, Sample, assert_saved, model_configs, placements
from recipes.verify.jaxpr import host_bytes, saved
from tests import helpers
from tests.recipes.common import BEARTYPE_DRAWS, abstract, savable_once, total
from zoo.llama.config import LlamaConfig
from zoo.models import abstract as make_abstract

pytestmark = [pytest.mark.usefixtures(savable_once.__name__), BEARTYPE_DRAWS]

# Random tables of each model, in the default profile; a deepseek takes two to three times as long to trace.
TABLES = {name: 20 if name.startswith("llama") else 8 for name in SAMPLES}
FACTOR = {"default": 1, "long": 5}
assert sum(TABLES.values()) >= 100

DEEP = Sample(
    LlamaConfig(vocab_size=11, dim=4, num_layers=32, num_heads=1, num_kv_heads=1, head_dim=4, mlp_dim=6), 1, 5
)


def trace(model: Any, placement: Placement, sample: Sample) -> Any:
    """The jaxpr of the gradient of the placed model's loss."""
    table = resolve(placement, model, sample.example)
    placed = place(model, placement, table=table)
    return jax.make_jaxpr(jax.grad(total))(placed, sample.batch())


def found(program: Any) -> list[tuple[str, str, int, int]]:
    return [(r.tag, r.place, r.layers, r.layer_bytes) for r in saved(program) if r.tag != "block_input"]


@pytest.mark.parametrize("name", SAMPLES)
def test_random_tables_are_saved_exactly(name: str):
    model, sample = abstract(name), SAMPLES[name]

    @settings(max_examples=TABLES[name] * FACTOR.get(settings.get_current_profile_name(), 1))
    @given(placements(model, sample.example))
    def check(placement: Placement):
        assert_saved(total, placement, model, sample.batch(), example=sample.example)

    check()


@pytest.fixture(scope="module")
def deep() -> Any:
    return make_abstract(DEEP.config)


def test_single_layers_of_32(deep: Any):
    """Case 14. One layer is batch 1, sequence 5, width 6, float32."""
    program = trace(deep, Placement(layers={"6+13+19+25+31": {"mlp_up": "host"}}), DEEP)
    residuals = saved(program)
    assert found(program) == [("mlp_up", "host", 1, 1 * 5 * 6 * 4)] * 5
    # Scans alternate: layers 0-5, 6, 7-12, 13, 14-18, 19, 20-24, 25, 26-30, 31.
    assert [r.scan for r in residuals if r.tag == "mlp_up"] == [1, 3, 5, 7, 9]
    assert [r.layers for r in residuals if r.tag == "block_input"] == [6, 1, 6, 1, 5, 1, 5, 1, 5, 1]
    assert host_bytes(program) == 5 * 120


def test_tags_of_one_shape_are_told_apart(deep: Any):
    """Case 15."""
    program = trace(deep, Placement(activations={"mlp_gate": "device", "mlp_up": "host"}), DEEP)
    assert sorted(found(program)) == [("mlp_gate", "device", 32, 120), ("mlp_up", "host", 32, 120)]


# Case 16: layers that hold one tag on the host -> the lengths of the scans that save it.
LAYERS = {"0-31": [32], "31": [1], "0": [1], "7": [1], "30-31": [2], "0-15+17-31": [16, 15]}


@pytest.mark.parametrize(("key", "lengths"), LAYERS.items(), ids=LAYERS)
def test_all_layers_or_one(deep: Any, key: str, lengths: list[int]):
    program = trace(deep, Placement(layers={key: {"attn_query": "host"}}), DEEP)
    assert found(program) == [("attn_query", "host", length, 1 * 5 * 4 * 4) for length in lengths]


def test_no_layer(deep: Any):
    program = trace(deep, Placement(), DEEP)
    assert found(program) == []
    assert host_bytes(program) == 0


def test_the_block_input_is_counted_once_and_where_it_is(deep: Any):
    for place_name in ("device", "host"):
        program = trace(deep, Placement(activations={"block_input": place_name}), DEEP)
        assert [(r.tag, r.place, r.layers, r.shape) for r in saved(program)] == [
            ("block_input", place_name, 32, (1, 5, 4))
        ]


def test_chosen_experts_are_saved_by_default():
    """Case 5: the backward pass is handed the decision and makes none of its own."""
    name = "deepseek_all_moe"
    program = trace(abstract(name), Placement(), SAMPLES[name])
    choices, rows = 2 * 8 * 2, 56  # 7 blocks of 8
    sizes = {"moe_chosen": [choices], "moe_plan": [7, choices, rows]}
    asked = [(tag, "device", 2, 4 * size) for tag, each in sizes.items() for size in each]
    assert sorted(found(program)) == sorted(asked)
    assert count(program, "sort", backward=True) == 0
    assert count(program, "top_k", backward=True) < count(
        trace(abstract(name), Placement(activations={"moe_chosen": "remat"}), SAMPLES[name]), "top_k", backward=True
    )


def count(program: Any, primitive: str, *, backward: bool) -> int:
    """Equations of a primitive in the scans over layers of the forward or the backward pass."""
    scans = [equation for equation in helpers.equations(program.jaxpr) if equation.primitive.name == "scan"]
    bodies = [scan.params["jaxpr"].jaxpr for scan in scans if scan.params["reverse"] == backward]
    return sum(equation.primitive.name == primitive for body in bodies for equation in helpers.equations(body))


@pytest.mark.parametrize("name", ["llama_tied", "deepseek_all_moe"])
@pytest.mark.parametrize("where", ["device", "host", "remat"])
def test_a_saved_context_spares_the_second_softmax(name: str, where: str):
    """One maximum and two exponentials (weights and their rebuilding) a layer; recomputing adds one of each."""
    model, sample = abstract(name), SAMPLES[name]
    program = trace(model, Placement(activations={"attn_context": where}), sample)
    expected = {"reduce_max": 1, "exp": 2} if where == "remat" else {"reduce_max": 0, "exp": 1}
    assert {primitive: count(program, primitive, backward=True) for primitive in expected} == expected


# What is kept of the experts -> products of each loop over their rows in the backward pass. The last loop is the
# gradient: one product towards the hidden rows, one for the scales, two towards the rows, three of weights.
LOOPS = {
    "remat": ({}, [2, 7]),
    "gate": ({"moe_gate": "host"}, [1, 7]),
    "both": ({"moe_gate": "host", "moe_up": "device"}, [7]),
}


@pytest.mark.parametrize(("activations", "expected"), LOOPS.values(), ids=LOOPS)
def test_experts_are_recomputed_only_where_gate_or_up_is_dropped(activations: dict[str, str], expected: list[int]):
    """Case 19: placements go by tag, so that products with a dim of experts are reached; down is never repeated."""
    name = "deepseek_all_moe"
    program = trace(abstract(name), Placement(activations=activations), SAMPLES[name])
    scans = [each for each in helpers.equations(program.jaxpr) if each.primitive.name == "scan"]
    (layers,) = [scan for scan in scans if scan.params["reverse"] and scan.params["length"] == 2]
    bodies = [
        loop.params["jaxpr"].jaxpr
        for loop in helpers.equations(layers.params["jaxpr"].jaxpr)
        if loop.primitive.name == "scan"
    ]
    found = [sum(each.primitive.name == "dot_general" for each in helpers.equations(body)) for body in bodies]
    assert found == expected


def test_residuals_are_found_under_accumulation(deep: Any):
    """A scan over micro-batches is entered, and not taken for one over layers."""
    placed = place(deep, Placement(layers={"3": {"mlp_up": "host"}}))
    tokens = jax.ShapeDtypeStruct((4, 1, 6), jnp.int32)

    def accumulated(model: Any, tokens: Any) -> Any:
        def add(sums: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.grad(total)(model, {"tokens": part})), None

        return jax.lax.scan(add, model, tokens)[0]

    assert found(jax.make_jaxpr(accumulated)(placed, tokens)) == [("mlp_up", "host", 1, 120)]


def test_untagged_scans_are_not_counted():
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x * w), x), x, w)[0])

    x, w = jnp.ones(3), jnp.ones((4, 3))
    assert saved(jax.make_jaxpr(jax.grad(loss, argnums=1))(x, w)) == []


def test_a_tag_that_is_not_kept_is_not_found():
    """The check is of the program, not of the words of the recipe: a policy that names nothing saves nothing."""

    def residuals(places: dict[str, str]) -> list[tuple[str, str]]:
        def body(x: Any, w: Any) -> Any:
            return jnp.sin(checkpoint_name(x @ w, "product")), None

        def loss(w: Any, x: Any) -> Any:
            return jnp.sum(jax.lax.scan(jax.checkpoint(body, policy=policy(places), prevent_cse=False), x, w)[0])

        program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 3, 3)), jnp.ones((2, 3)))
        return [(r.tag, r.place) for r in saved(program)]

    assert residuals({}) == residuals({"product": "remat"}) == residuals({"other": "host"}) == []
    assert residuals({"product": "host"}) == [("product", "host")]
    assert residuals({"product": "device"}) == [("product", "device")]


def test_a_tag_is_found_through_functions_that_are_jitted_by_themselves():
    """Named within a jitted function, or outside and handed through one; one function called twice."""

    @jax.jit
    def product(x: Any, w: Any) -> Any:
        return checkpoint_name(x @ w, "product")

    @jax.jit
    def through(x: Any, y: Any) -> tuple[Any, Any]:
        return jnp.sin(x) * y, x

    def body(x: Any, w: Any) -> Any:
        sine, same = through(checkpoint_name(x * 2.0, "doubled"), product(product(x, w), w))
        return sine * jnp.cos(same), None

    def loss(w: Any, x: Any) -> Any:
        checkpointed = jax.checkpoint(body, policy=policy({"product": "host", "doubled": "device"}), prevent_cse=False)
        return jnp.sum(jax.lax.scan(checkpointed, x, w)[0])

    program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 3, 3)), jnp.ones((2, 3)))
    assert sorted({(r.tag, r.place, r.layers, r.layer_bytes) for r in saved(program)}) == [
        ("doubled", "device", 4, 24),
        ("product", "host", 4, 24),
    ]


def test_the_check_fails_where_the_program_saves_elsewhere():
    sample, placement = SAMPLES["llama_tied"], Placement(layers={"1": {"mlp_up": "host"}})
    for word in ("device", "remat"):

        def moved(model: Any, batch: Any, word: str = word) -> Any:
            return total(replace_places(model, lambda place: word if place == "host" else place), batch)

        with pytest.raises(AssertionError, match=rf"mlp_up +1 +host +{word} .*! is"):
            assert_saved(moved, placement, abstract("llama_tied"), sample.batch(), example=sample.example)


@settings(max_examples=5)
@given(st.data())
def test_drawn_placements_resolve(data: st.DataObject):
    sample = data.draw(model_configs())
    model = make_abstract(sample.config)
    placement = data.draw(placements(model, sample.example, max_rows=3))
    table = resolve(placement, model, sample.example)
    assert len(table.layers) == sample.config.num_layers + getattr(sample.config, "num_mtp_layers", 0)
    assert all("attn_lse" not in cells for cells in placement.layers.values())
