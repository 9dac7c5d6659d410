"""The grammar of a placement, as far as no model is needed: layer keys, places, presets."""

from typing import Any

import pytest

from recipes import Placement
from recipes.placement.layer_keys import layer_numbers
from zoo.checks import ConfigError

KEYS = {
    "7": {7},
    "0-2": {0, 1, 2},
    "3-3": {3},
    "6+13+19": {6, 13, 19},
    "last": {31},
    "30-last": {30, 31},
    "last-last": {31},
    "0-1+5+last": {0, 1, 5, 31},
    "0-2+1-3": {0, 1, 2, 3},
}


@pytest.mark.parametrize(("key", "numbers"), KEYS.items(), ids=KEYS)
def test_a_key_names_layers(key: str, numbers: set[int]):
    assert layer_numbers(key, 32) == numbers


def test_last_is_the_last_layer_of_the_model():
    assert [layer_numbers("last", n) for n in (1, 2, 61)] == [{0}, {1}, {60}]


@pytest.mark.parametrize("key", ["", "a", "-1", "1-", "1+", "+", "1--2", "0..2", "0,1", "first", "LAST", "1.0", "²"])
def test_other_words_are_no_layers(key: str):
    with pytest.raises(ConfigError) as error:
        Placement(layers={key: {"mlp_up": "host"}})
    assert f"placement.layers={key}: not a set of layers" in str(error.value)
    assert "write 7, 0-2, 6+13+19 or last" in str(error.value)


def test_a_range_that_runs_backwards_says_how_to_write_it():
    with pytest.raises(ConfigError, match=r"(?s)placement\.layers=0\+5-2: runs backwards.*write 2-5"):
        Placement(layers={"0+5-2": {"mlp_up": "host"}})


@pytest.mark.parametrize("key", ["0-99", "4", "3+4", "0+99"])
def test_a_layer_beyond_the_last_is_an_error(key: str):
    with pytest.raises(ConfigError, match=r"the model has layers 0 to 3"):
        layer_numbers(key, 4)


@pytest.mark.parametrize(("key", "layers"), [("last-2", 8), ("5-last", 4), ("4-last", 4)])
def test_a_range_to_or_from_last_is_never_empty(key: str, layers: int):
    with pytest.raises(ConfigError):
        layer_numbers(key, layers)


def test_integer_keys_are_the_same_as_words():
    cells = {"mlp_up": "host"}
    layers: Any = {7: cells}
    assert Placement(layers=layers) == Placement(layers={"7": cells})
    assert list(Placement(layers=layers).layers) == ["7"]


def test_a_layer_named_by_number_and_by_word_is_an_error():
    layers: Any = {7: {"mlp_up": "host"}, "7": {"mlp_gate": "host"}}
    with pytest.raises(ConfigError, match=r"placement\.layers=7: stands twice"):
        Placement(layers=layers)


@pytest.mark.parametrize("cells", ["host", None, ["mlp_up"]])
def test_a_layer_needs_a_map(cells: Any):
    with pytest.raises(ConfigError, match=r"placement\.layers\.0=.*needs a map of tags to places"):
        Placement(layers={"0": cells})


def test_a_placement_keeps_nothing_of_what_it_was_made_from():
    cells = {"mlp_up": "host"}
    placement = Placement(layers={"0": cells})
    cells["mlp_up"] = "device"
    assert placement.layers["0"]["mlp_up"] == "host"


# Where a place can stand: how to write it, and the key that an error must name.
SPOTS = {
    "placement.default": lambda place: Placement(default=place),
    "placement.activations.mlp_up": lambda place: Placement(activations={"mlp_up": place}),
    "placement.layers.0-2.mlp_up": lambda place: Placement(layers={"0-2": {"mlp_up": place}}),
}


@pytest.mark.parametrize("place", ["device", "host", "remat"])
@pytest.mark.parametrize("make", SPOTS.values(), ids=SPOTS)
def test_the_three_places(make: Any, place: str):
    make(place)


OTHER_WORDS = ["on", "off", "no", "yes", "True", "Host", "", "cpu", True, False, None, 1]


# YAML 1.1 reads on, off, yes, no as booleans: neither the words nor what becomes of them are places.
@pytest.mark.parametrize("place", OTHER_WORDS)
@pytest.mark.parametrize(("key", "make"), SPOTS.items(), ids=SPOTS)
def test_other_words_are_no_places(key: str, make: Any, place: Any):
    with pytest.raises(ConfigError) as error:
        make(place)
    assert str(error.value).startswith(f"{key}={place}: ")
    assert "allowed: device, host, remat" in str(error.value)


@pytest.mark.parametrize(("key", "make"), SPOTS.items(), ids=SPOTS)
def test_offload_is_answered_with_host(key: str, make: Any):
    with pytest.raises(ConfigError, match=rf"{key}=offload: no such place; .* the place host"):
        make("offload")


def test_a_misspelt_place_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean device\?"):
        Placement(default="devise")


def test_presets_are_the_files_and_say_what_their_names_say():
    assert {"device", "host", "remat", "block_input_host", "blog_llama", "blog_deepseek"} <= set(Placement.presets())
    for name in ("device", "host", "remat"):
        assert Placement.preset(name) == Placement(default=name)
    assert Placement.preset("block_input_host") == Placement(activations={"block_input": "host"})


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"(?s)placement=blog_lama: no such preset.*did you mean blog_llama"):
        Placement.preset("blog_lama")
