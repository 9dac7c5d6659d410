"""The placement table as text."""

import jax
import jax.numpy as jnp

from recipes import Placement, resolve
from recipes.placement.show import format_bytes
from tests.recipes.common import abstract

EXAMPLE = (jax.ShapeDtypeStruct((2, 7), jnp.int32),)
PLACEMENT = Placement(
    activations={"attn_out": "device"}, layers={"1+3": {"mlp_up": "host"}, "last": {"mlp_up": "device"}}
)


def test_equal_layers_share_a_column():
    lines = str(resolve(PLACEMENT, abstract("llama_five_layers"), EXAMPLE)).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["placement"] == ["a", "layer", "0+2", "1+3", "4"]
    assert rows["mlp_up"] == ["672", "B", "remat", "host", "device"]
    assert rows["attn_out"] == ["336", "B", "device", "device", "device"]
    # 5 block inputs and outputs of the attention (336 bytes) and one mlp_up (672) against two mlp_up
    assert lines[-1] == "5 layers in 5 segments; saved activations: 3.9 KiB on device, 1.3 KiB on host"


def test_a_layer_without_the_tag_has_an_empty_cell():
    lines = str(resolve(Placement(), abstract("deepseek_nine_experts", num_layers=3), EXAMPLE)).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["placement"][-2:] == ["0", "1-2"]
    assert rows["mlp_up"][-1] == "remat"
    assert len(rows["mlp_up"]) == len(rows["moe_scores"]) == 3  # size, unit, one place
    assert rows["attn_out"][-2:] == ["remat", "remat"]


def test_a_table_of_many_columns_is_broken_into_lines_of_limited_width():
    layers = {str(layer): {tag: "host"} for layer, tag in enumerate(("mlp_up", "mlp_gate", "attn_out", "attn_key"))}
    found = resolve(Placement(layers=layers), abstract("llama_five_layers"), EXAMPLE)
    assert max(len(line) for line in str(found).splitlines()) <= 120


def test_explain_names_the_entry_that_decided():
    text = resolve(PLACEMENT, abstract("llama_five_layers"), EXAMPLE).explain()
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["tag", "layers", "place", "decided", "by"]
    assert ["mlp_up", "1+3", "host", "placement.layers.1+3.mlp_up"] in rows
    assert ["mlp_up", "4", "device", "placement.layers.last.mlp_up"] in rows
    assert ["mlp_up", "0+2", "remat", "placement.default"] in rows
    assert ["attn_out", "0-4", "device", "placement.activations.attn_out"] in rows
    assert ["attn_lse", "0-4", "remat", "follows", "attn_context"] in rows


def test_sizes_are_in_binary_units():
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 * 2**20, 2.5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "2.5 GiB",
        "3.0 TiB",
    ]


def test_many_segments_warn_with_their_cost_and_a_pattern_that_helps():
    deep = abstract("llama_five_layers", num_layers=20)
    alternating = {"+".join(map(str, range(0, 20, 2))): {"mlp_up": "host"}}
    note = "note: 20 segments take roughly 4 times as long to compile as one"
    for group, expected in {1: [f"{note}; placement.group=2 would make 1"], 2: []}.items():
        found = resolve(Placement(layers=alternating, group=group), deep, EXAMPLE)
        assert [line for line in str(found).splitlines() if line.startswith("note")] == expected
    squares = {"0+1+4+9+16": {"mlp_up": "host"}, "2+6+12+13": {"mlp_gate": "host"}}  # no pattern
    assert str(resolve(Placement(layers=squares), deep, EXAMPLE)).endswith("to compile as one")
