"""The trace: every way in which a tag misses its place is seen in the jaxpr, also of a step that is not ours."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import recipes
from layers.nodes import map_nodes
from layers.tag import Tag
from recipes import MeshConfig, Placement, place, resolve
from recipes.config import TrainConfig
from recipes.placement.segments import replace_places
from recipes.setup import Setup
from recipes.verify import trace
from recipes.verify.tracing import Trace
from tests.recipes import own_step
from tests.recipes.common import abstract, total
from tests.recipes.test_gradients import config
from tests.recipes.test_jaxpr import DEEP
from zoo.models import abstract as make_abstract
from zoo.registry import config as model_config

NAME = "llama_tied"
HOST = Placement(default="host")


def of_model(placement: Placement, asked: Placement | None = None, change: Any = lambda placed: placed) -> Trace:
    """The trace of a gradient whose model was placed by one placement, against the table of another."""
    canonical, example = abstract(NAME), (jax.ShapeDtypeStruct((2, 8), jnp.int32),)
    placed = change(place(canonical, placement, table=resolve(placement, canonical, example)))
    batch = {"tokens": jax.ShapeDtypeStruct((2, 9), jnp.int32)}
    return trace(jax.grad(total), placed, batch, asked=resolve(asked or placement, canonical, example))


def wrong(report: Trace) -> dict[tuple[str, str], list[int]]:
    """Tag and problem -> layers."""
    found: dict[tuple[str, str], list[int]] = {}
    for cell in report.cells:
        if cell.problem is not None:
            found.setdefault((cell.tag, cell.problem), []).append(cell.layer)
    return found


def test_all_is_well_and_sums_up():
    report = of_model(HOST)
    assert report.ok
    assert report.asked == report.found == len(report.cells) == 4 * 9
    layer = {cell.tag: cell for cell in report.cells if cell.layer == 3}
    assert (layer["mlp_up"].found_bytes, layer["mlp_up"].reads) == (2 * 8 * 12 * 4, 2)
    assert (
        report.place_bytes("host")
        == 4 * report.place_bytes("host", 2)
        == 4 * sum(cell.found_bytes for cell in layer.values())
    )


def test_what_is_kept_without_a_tag_is_found_with_its_line():
    """The largest: what leaves the last layer, its product with the norm's scale, and the slopes of the loss."""
    untagged = of_model(HOST).untagged
    assert [each.num_bytes for each in untagged] == sorted((each.num_bytes for each in untagged), reverse=True)
    assert untagged[0].shape == (2, 8, 8)
    assert {"placement/segments.py", "layers/norm.py", "step/loss.py"} <= {
        each.source.partition(":")[0] for each in untagged
    }


def test_an_untagged_array_of_every_layer():
    def loss(w: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda x, w: (jnp.sin(jnp.cos(checkpoint_name(x @ w, "a"))), None), prevent_cse=False)
        policy = jax.checkpoint_policies.everything_saveable
        everything = jax.checkpoint(body, policy=policy, prevent_cse=False)
        return jnp.sum(jax.lax.scan(everything, x, w)[0])

    report = trace(jax.grad(loss), jax.ShapeDtypeStruct((5, 3, 3), jnp.float32), jnp.ones((2, 3)))
    kept = {(each.operation, each.steps, each.step_bytes) for each in report.untagged if each.loop is not None}
    assert ("block input", 5, 24) in kept


def test_a_tag_misspelt_inside_a_model():
    def misspelt(placed: Any) -> Any:
        return map_nodes(
            lambda tag: dataclasses.replace(tag, name="mlp_gaet") if tag.name == "mlp_gate" else tag, placed, Tag
        )

    assert wrong(of_model(HOST, change=misspelt)) == {
        ("mlp_gate", "nothing has this name; did you mean mlp_gaet?"): [0, 1, 2, 3]
    }


def test_a_policy_that_saves_instead_of_offloading_for_one_layer_of_32():
    canonical, example = make_abstract(DEEP.config), (jax.ShapeDtypeStruct((1, 5), jnp.int32),)
    other = Placement(default="host", layers={"17": {"mlp_up": "device"}})
    placed = place(canonical, other, table=resolve(other, canonical, example))
    report = trace(jax.grad(total), placed, DEEP.batch(), asked=resolve(HOST, canonical, example))
    assert wrong(report) == {("mlp_up", "is on device"): [17]}
    assert (report.asked, report.found) == (32 * 9, 32 * 9 - 1)
    assert str(report).splitlines()[1].split() == [
        "mlp_up",
        "17",
        "host",
        "device",
        "120",
        "B",
        "2",
        "!",
        "is",
        "on",
        "device",
    ]


@pytest.mark.parametrize(
    ("word", "problem"), [("device", "is on device"), ("remat", "is computed again: no policy keeps it")]
)
def test_a_program_placed_otherwise(word: str, problem: str):
    def change(placed: Any) -> Any:
        return replace_places(placed, lambda place: word if place == "host" else place)

    placement = Placement(layers={"1-2": {"mlp_up": "host"}})
    assert wrong(of_model(placement, change=change)) == {("mlp_up", problem): [1, 2]}


def test_what_is_kept_though_it_was_to_be_computed_again():
    asked, given = Placement(), Placement(layers={"2": {"mlp_up": "host"}})
    assert wrong(of_model(given, asked)) == {("mlp_up", "is on host"): [2]}


def test_another_number_of_layers_or_bytes():
    canonical = abstract(NAME, num_layers=3)
    placed = place(canonical, HOST, table=resolve(HOST, canonical))
    table = resolve(HOST, abstract(NAME), (jax.ShapeDtypeStruct((2, 8), jnp.int32),))
    report = trace(jax.grad(total), placed, {"tokens": jax.ShapeDtypeStruct((2, 8), jnp.int32)}, asked=table)
    assert report.problems == ("the program has 3 layers in loops that a backward pass reads, asked were 4",)
    assert ("mlp_up", "672 bytes, asked were 768") in wrong(report)


def test_a_pattern_is_told_apart_layer_by_layer():
    """Two layers a step: what one of them keeps is not the other's."""
    placement = Placement(default="remat", layers={"0+2": {"mlp_up": "host"}, "1+3": {"mlp_gate": "device"}}, group=2)
    report = of_model(placement)
    assert report.ok
    assert {(c.layer, c.tag, c.found) for c in report.cells if c.found != "remat" and c.tag != "block_input"} == {
        (0, "mlp_up", "host"), (2, "mlp_up", "host"), (1, "mlp_gate", "device"), (3, "mlp_gate", "device")
    }  # fmt: skip
    turned = Placement(default="remat", layers={"1+3": {"mlp_up": "host"}, "0+2": {"mlp_gate": "device"}}, group=2)
    assert len(wrong(of_model(placement, turned))) == 4


# Variant -> what is said of its one tag.
OWN = {
    "right": None,
    "misspelt name": "nothing has this name; did you mean hidden?",
    "misspelt destination": "is on device",
    "named output": "is the output of the layer, kept as the next one's input: name the input instead",
    "unread value": "no operation of the backward pass reads it",
}


@pytest.mark.parametrize(("variant", "problem"), OWN.items(), ids=OWN)
def test_a_step_that_is_not_ours(variant: str, problem: str | None):
    """Nothing is told: the program's own policy says what was asked."""
    report = trace(own_step.make_step(variant), *own_step.arguments())
    assert report.ok is (problem is None)
    tag = "hiden" if variant == "misspelt name" else "hidden"
    assert [(c.layer, c.tag, c.asked, c.problem) for c in report.cells] == [
        (layer, tag, "host", problem) for layer in range(own_step.LAYERS)
    ]


def test_a_step_that_is_not_ours_against_what_we_ask():
    step, args = own_step.make_step("right"), own_step.arguments()
    size = own_step.BATCH * own_step.HIDDEN * 4
    assert trace(step, *args, asked={"hidden": "host"}).place_bytes("host") == own_step.LAYERS * size
    assert wrong(trace(step, *args, asked={})) == {("hidden", "is kept on host, not asked"): [0, 1, 2, 3]}
    rows = [{"hidden": "host"}] * 3 + [{"hidden": "device"}]
    assert wrong(trace(step, *args, asked=rows)) == {("hidden", "is on host"): [3]}


def test_layers_without_a_loop_are_the_uses_of_a_tag():
    policy = recipes.policy({"hidden": "host"})

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            layer = jax.checkpoint(lambda x, w: jnp.sin(checkpoint_name(x @ w, "hidden")), policy=policy)
            x = layer(x, weight)
        return jnp.sum(x)

    report = trace(jax.grad(loss), [jnp.ones((3, 3))] * 3, jnp.ones((2, 3)))
    assert [(c.layer, c.asked, c.found, c.found_bytes, c.reads) for c in report.cells] == [
        (layer, "host", "host", 24, 1) for layer in range(3)
    ]


def test_the_report_fits_a_terminal_and_becomes_json():
    report = of_model(HOST, Placement())
    assert max(map(len, str(report).splitlines())) <= 100
    assert "! is on host" in str(report).splitlines()[1]
    read = json.loads(json.dumps(report.to_json()))
    assert (read["ok"], read["asked"], read["found"]) == (False, report.asked, report.found)
    assert read["bytes"]["host"] == report.place_bytes("host") == sum(row["host"] for row in read["layers"])
    assert read["untagged_bytes"] == sum(each["num_bytes"] for each in read["untagged"])


# Axes of a mesh, micro-batches.
STEPS = {"one device": ({}, 4), "split": ({"fsdp": 4, "tensor": 2}, 1), "experts": ({"fsdp": 2, "expert": 4}, 2)}


@pytest.mark.parametrize(("axes", "accumulate"), STEPS.values(), ids=STEPS)
def test_a_whole_step_with_micro_batches_on_a_mesh(axes: dict[str, int], accumulate: int):
    """A DeepSeek with a dense layer, experts and multi-token prediction; a layer of its own and runs."""
    model = model_config("debug_deepseek", num_layers=3, num_mtp_layers=1)
    placement = Placement(default="host", layers={"1": {"moe_gate": "device", "attn_out": "remat"}})
    train = TrainConfig(batch_size=16, sequence_length=16, accumulate=accumulate)
    setup = Setup(dataclasses.replace(config(model, placement), mesh=MeshConfig(**axes), train=train))
    report = trace(setup.step, setup.abstract_state(), setup.abstract_batch(), asked=setup.table)
    assert report.ok, str(report)
    assert report.asked == sum(len(row) for row in setup.table.rows())
    if not axes:  # else experts' rows are those of each device, padded
        for place_name in ("device", "host"):
            assert report.place_bytes(place_name) == setup.table.place_bytes(place_name)
    other = dataclasses.replace(setup.table, layers=setup.table.layers[::-1])
    assert not trace(setup.step, setup.abstract_state(), setup.abstract_batch(), asked=other).ok


def test_the_step_of_deepseek_v3_671b():
    train = TrainConfig(batch_size=8, sequence_length=4096, dtype="bfloat16")
    placed = config(model_config("deepseek_v3_671b"), Placement.preset("blog_deepseek"))
    setup = Setup(dataclasses.replace(placed, train=train))
    report = trace(setup.step, setup.abstract_state(), setup.abstract_batch(), asked=setup.table)
    assert (report.ok, report.asked) == (True, 1141)
    assert report.trace_s < 20
    latents, gates = 8 * 4096 * (1536 + 576) * 2, 8 * 4096 * 2 * 18432 * 2
    assert report.place_bytes("host", 0) == latents + gates
