"""Placements against models: what wins, which cells exist, what is refused and with what words."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import zoo
from layers import Stack, Tag, name_tags, tag
from recipes import Placement, Table, place, resolve
from tests.recipes.common import abstract, savable_once
from zoo.checks import ConfigError

pytestmark = pytest.mark.usefixtures(savable_once.__name__)

LLAMA = "llama_five_layers"
DEEPSEEK = "deepseek_nine_experts"  # here layer 0 is dense, 1 and 2 are MoE
NUM_LAYERS = {LLAMA: 5, DEEPSEEK: 3}
EXAMPLE = (jax.ShapeDtypeStruct((2, 7), jnp.int32),)


def table(name: str, **fields: Any) -> Table:
    return resolve(Placement(**fields), abstract(name, num_layers=NUM_LAYERS[name]), EXAMPLE)


def column(found: Table, tag: str) -> list[str | None]:
    """The places of a tag, layer by layer."""
    return [row[tag].place for row in found.layers if tag in row]


def test_default_is_the_place_of_all_else():
    for default in ("device", "host", "remat"):
        found = table(LLAMA, default=default, activations={"mlp_up": "device"})
        assert column(found, "mlp_gate") == [default] * 5
        assert column(found, "mlp_up") == ["device"] * 5


def test_layers_win_over_activations_over_default():
    found = table(LLAMA, activations={"mlp_up": "host"}, layers={"1+3": {"mlp_up": "device"}})
    assert column(found, "mlp_up") == ["host", "device", "host", "device", "host"]
    assert column(found, "mlp_gate") == ["remat"] * 5
    assert found.layers[1]["mlp_up"].reason == "placement.layers.1+3.mlp_up"
    assert found.layers[0]["mlp_up"].reason == "placement.activations.mlp_up"
    assert found.layers[0]["mlp_gate"].reason == "placement.default"


@pytest.mark.parametrize("order", [1, -1])
def test_the_key_that_names_fewer_layers_wins_in_any_order(order: int):
    keys = [("0-last", "remat"), ("1-3", "host"), ("2-3", "device"), ("last", "host"), ("3", "remat")]
    found = table(LLAMA, default="device", layers={key: {"mlp_up": place} for key, place in keys[::order]})
    assert column(found, "mlp_up") == ["remat", "host", "device", "remat", "host"]


def test_keys_of_one_size_must_agree_where_they_meet():
    agreeing = {"0-1": {"mlp_up": "host"}, "1-2": {"mlp_up": "host", "mlp_gate": "device"}}
    assert column(table(LLAMA, layers=agreeing), "mlp_up") == ["host"] * 3 + ["remat"] * 2
    with pytest.raises(ConfigError) as error:
        table(LLAMA, layers={"0-1": {"mlp_up": "host"}, "1+4": {"mlp_up": "device"}})
    assert str(error.value) == "placement.layers.1+4.mlp_up=device: layer 1 is also named by 0-1, which says host"


def test_a_smaller_key_settles_a_dispute_only_of_its_own_layers():
    layers = {"0": {"mlp_up": "remat"}, "0-1": {"mlp_up": "host"}, "2-3": {"mlp_up": "device"}}
    assert column(table(LLAMA, layers=layers), "mlp_up") == ["remat", "host", "device", "device", "remat"]


def test_the_block_input_stays_on_the_device_unless_it_goes_to_the_host():
    assert column(table(LLAMA), "block_input") == ["device"] * 5
    assert column(table(LLAMA, default="host"), "block_input") == ["host"] * 5
    assert column(table(LLAMA, activations={"block_input": "host"}), "block_input") == ["host"] * 5


@pytest.mark.parametrize("tag", ["moe_chosen", "moe_plan"])
def test_the_choice_of_experts_stays_on_the_device_unless_named(tag: str):
    for default in ("device", "host", "remat"):
        assert column(table(DEEPSEEK, default=default), tag) == ["device"] * 2
    for named in ("host", "remat"):
        assert column(table(DEEPSEEK, activations={tag: named}), tag) == [named] * 2
    assert column(table(DEEPSEEK, layers={"last": {tag: "host"}}), tag) == ["device", "host"]


def test_a_tag_that_names_several_arrays_counts_them_all():
    """Of 2 sequences of 7 tokens, 2 of 9 experts each: blocks of 8 rows, int32."""
    choices, blocks = 2 * 7 * 2, (2 * 7 * 2 + 9 * 7) // 8
    sizes = [row["moe_plan"].array_bytes for row in table(DEEPSEEK).layers if "moe_plan" in row]
    assert sizes == [4 * (choices + blocks * 8 + blocks)] * 2


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
def test_the_log_sum_exp_follows_the_context(name: str):
    found = table(name, default="device", layers={"0": {"attn_context": "host"}, "1": {"attn_context": "remat"}})
    assert column(found, "attn_lse") == column(found, "attn_context")
    assert column(found, "attn_lse")[:2] == ["host", "remat"]
    assert found.layers[0]["attn_lse"].reason == "follows attn_context"
    same = {"attn_context": "host", "attn_lse": "host"}
    assert column(table(name, activations=same), "attn_lse")[0] == "host"


def test_bytes_are_those_of_the_example():
    found = table(LLAMA, default="host").layers[0]
    # batch 2, sequence 7, float32; dim 6, 4 query heads and one key head of 2, feed-forward 12
    expected = {"attn_query": 8, "attn_key": 2, "attn_value": 2, "attn_context": 8, "attn_lse": 4, "attn_out": 6}
    expected |= {"mlp_gate": 12, "mlp_up": 12, "block_input": 6}
    assert {tag: cell.array_bytes for tag, cell in found.items()} == {t: 2 * 7 * 4 * n for t, n in expected.items()}
    assert table(LLAMA, default="host").place_bytes("host") == 5 * 2 * 7 * 4 * sum(expected.values())


def test_rows_of_equal_neighbours_are_one_segment():
    assert table(LLAMA).num_segments == 1
    assert table(LLAMA, layers={"2": {"mlp_up": "host"}}).num_segments == 3
    assert table(LLAMA, layers={"0-1": {"mlp_up": "host"}, "2-4": {"mlp_up": "device"}}).num_segments == 2
    assert table(DEEPSEEK).num_segments == 2  # a dense layer is no MoE layer


# model, what is asked, and what the message must hold
REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "misspelt_tag": (
        LLAMA,
        {"activations": {"attn_qeury": "host"}},
        ["placement.activations.attn_qeury=host: ", "did you mean attn_query", "allowed: ", "mlp_gate"],
    ),
    "misspelt_tag_of_a_layer": (
        LLAMA,
        {"layers": {"0-1": {"mlp_gat": "host"}}},
        ["placement.layers.0-1.mlp_gat=host: ", "did you mean mlp_gate"],
    ),
    "tag_of_another_family": (
        LLAMA,
        {"activations": {"moe_up": "host"}},
        ["placement.activations.moe_up=host: no tag moe_up", "mlp_up"],
    ),
    "tag_that_the_layer_lacks": (
        DEEPSEEK,
        {"layers": {"0-1": {"moe_up": "host"}}},
        ["placement.layers.0-1.moe_up=host: layer 0 has no tag moe_up", "allowed: ", "mlp_up"],
    ),
    "tag_that_the_last_layer_lacks": (
        DEEPSEEK,
        {"layers": {"last": {"mlp_up": "host"}}},
        ["layer 2 has no tag mlp_up", "moe_up"],
    ),
    "layer_beyond": (
        LLAMA,
        {"layers": {"0-99": {"mlp_up": "host"}}},
        ["placement.layers=0-99: the model has layers 0 to 4"],
    ),
    "block_input": (
        LLAMA,
        {"activations": {"block_input": "remat"}},
        ["placement.activations.block_input=remat: ", "cannot be recomputed", "allowed: device, host"],
    ),
    "block_input_of_a_layer": (
        DEEPSEEK,
        {"layers": {"0": {"block_input": "remat"}}},
        ["placement.layers.0.block_input=remat: ", "allowed: device, host"],
    ),
    "follower": (
        LLAMA,
        {"activations": {"attn_lse": "host"}},
        ["placement.activations.attn_lse=host: ", "shares the place of attn_context, which is remat", "name attn_con"],
    ),
    "follower_of_a_layer": (
        DEEPSEEK,
        {"default": "host", "layers": {"1": {"attn_lse": "device"}}},
        ["placement.layers.1.attn_lse=device: ", "which is host in layer 1"],
    ),
}


@pytest.mark.parametrize(("name", "fields", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(name: str, fields: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        table(name, **fields)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


class Faint(eqx.Module):
    """A block with a tag that no derivative reads: the sum that it names has a constant derivative."""

    weight: Array
    shifted: Tag[Float[Array, "batch dim"]] = tag()
    bent: Tag[Float[Array, "batch dim"]] = tag()

    def __init__(self, weight: Any):
        self.weight = weight
        name_tags(self, "faint")

    def __call__(self, x: Array) -> tuple[Array, None]:
        return self.shifted(x + jnp.sin(self.bent(x @ self.weight))), None


class Model(eqx.Module):
    layers: Stack

    def __call__(self, x: Array) -> Array:
        return self.layers(x)[0]


def test_a_cell_without_effect_is_skipped_by_defaults_and_refused_by_name():
    weight = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    model, example = Model(Stack((Faint(weight), Faint(weight)))), (jax.ShapeDtypeStruct((2, 3), jnp.float32),)
    for default in ("device", "host", "remat"):
        found = resolve(Placement(default=default), model, example)
        assert column(found, "faint_shifted") == [None, None]
        assert found.rows() == [{"faint_bent": default}] * 2
        assert found.place_bytes(default) == 2 * 2 * 3 * 4
        assert "faint_shifted  -" in str(found)
    refused: list[dict[str, Any]] = [{"activations": {"faint_shifted": "host"}}]
    refused += [{"layers": {"1": {"faint_shifted": "remat"}}}]
    for fields in refused:
        with pytest.raises(ConfigError, match=r"(?s)faint_shifted: no place of it has an effect.*name one of: faint_b"):
            resolve(Placement(**fields), model, example)


def test_a_model_without_a_stack_is_refused():
    with pytest.raises(ConfigError, match=r"model=Linear: has no layers\.Stack"):
        resolve(Placement(), eqx.nn.Linear(2, 2, key=jax.random.key(0)))


SUITED = [
    (name, preset)
    for name in ("debug_llama", "debug_deepseek")
    for preset in Placement.presets()
    if not (name == "debug_llama" and (preset.startswith("blog_deepseek") or preset == "host_experts"))
]
# What each preset puts on the host.
ON_HOST = {"blog_llama": {"attn_query", "attn_key", "attn_value"}, "block_input_host": {"block_input"}}
ON_HOST |= {name: set() for name in ("device", "remat", "blog_deepseek_device", "blog_llama_device")}
ON_HOST |= {name: set() for name in ("zero_offload", "host_all_state", "host_experts")}  # of activations


@pytest.mark.parametrize(("name", "preset"), SUITED)
def test_presets_suit_the_debug_models(name: str, preset: str):
    found = resolve(Placement.preset(preset), zoo.abstract(name), EXAMPLE)
    on_host = {tag for row in found.rows() for tag, place in row.items() if place == "host"}
    everything = {tag for row in found.layers for tag in row}
    latents = {"attn_query_latent", "attn_kv_latent"}
    wide = {f"{mlp}_{part}" for mlp in ("mlp", "moe", "shared") for part in ("gate", "up")}
    expected = ON_HOST | {"host": everything - {"moe_chosen", "moe_plan"}, "blog_deepseek": latents | wide}
    assert on_host == expected[preset]


def test_the_deepseek_preset_is_refused_on_a_llama():
    with pytest.raises(ConfigError, match=r"placement\.activations\.attn_query_latent=host: no tag"):
        resolve(Placement.preset("blog_deepseek"), abstract(LLAMA))


def test_place_resolves_by_itself():
    placement = Placement(layers={"1": {"mlp_up": "host"}})
    placed = place(abstract(LLAMA), placement)
    assert [dict(run.places[0])["mlp_up"] for run in placed.layers.runs] == ["remat", "host", "remat"]
    assert [(run.first, run.length) for run in placed.layers.runs] == [(0, 1), (1, 1), (2, 3)]
