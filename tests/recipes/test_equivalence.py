"""A placement changes where activations live and nothing else: gradients of placed programs against their twins."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jaxtyping import Array, Float

from layers import Stack, Tag, name_tags, tag
from recipes import Placement, place, resolve, unplace
from recipes.verify.equivalence import (
    SAMPLES,
    assert_equivalent,
    assert_saved,
    difference,
    placements,
    value_and_gradient,
)
from tests import helpers
from tests.recipes.common import BEARTYPE_DRAWS, abstract, batch, model, savable_once, total

pytestmark = [pytest.mark.usefixtures(savable_once.__name__), BEARTYPE_DRAWS]

# Examples of each model, fewer where compiling takes longer; the long profile draws 21 times as many.
EXAMPLES = dict(zip(SAMPLES, (11, 5, 3, 1, 1, 1, 1, 1), strict=True))
FACTOR = {"default": 1, "long": 21}
assert sum(EXAMPLES.values()) >= 24
assert sum(EXAMPLES.values()) * FACTOR["long"] >= 500

FAST = {"xla_backend_optimization_level": 0}


@functools.cache
def reference(name: str) -> Any:
    """Loss and gradients of the canonical model, which has no segments and saves everything."""
    return value_and_gradient(total, model(name), batch(name), options=FAST)


@pytest.mark.parametrize("name", SAMPLES)
def test_random_tables_give_the_gradients_of_their_twins(name: str):
    @settings(max_examples=EXAMPLES[name] * FACTOR.get(settings.get_current_profile_name(), 1))
    @given(placements(model(name), SAMPLES[name].example))
    def check(placement: Placement):
        assert_equivalent(
            total,
            placement,
            model(name),
            batch(name),
            tolerance=helpers.FLOAT32_MODEL,
            example=SAMPLES[name].example,
            expected=reference(name),
            options=FAST,
        )

    check()


def gradients(name: str, placement: Placement, data: Any = None) -> Any:
    """Loss and canonical gradients of a placed model, compiled as a train step is."""
    placed = place(model(name), placement, table=resolve(placement, abstract(name), SAMPLES[name].example))
    return unplace(value_and_gradient(total, placed, batch(name) if data is None else data))


@pytest.mark.usefixtures("usual_machine_code")
@pytest.mark.parametrize("name", ["llama_tied", "deepseek_v2"] if helpers.LONG else ["deepseek_v2"])
def test_remat_host_and_device_agree_bit_for_bit(name: str):
    """In float32 on the CPU, with XLA's usual options: recomputing repeats the same operations."""
    device = gradients(name, Placement(default="device"))
    helpers.assert_finite(device)
    helpers.assert_bit_equal(gradients(name, Placement()), device)
    helpers.assert_bit_equal(gradients(name, Placement(default="host")), device)


def test_segments_change_nothing():
    """Five single layers against one scan of five, both under remat; and the canonical model, which has no scan."""
    name = "llama_five_layers"
    chequered = Placement(layers={"1+3": {"mlp_up": "host"}})
    one = gradients(name, Placement())
    helpers.assert_close(gradients(name, chequered), one, helpers.FLOAT32_MODEL)
    helpers.assert_close(one, value_and_gradient(total, model(name), batch(name)), helpers.FLOAT32_MODEL)


def test_equal_tokens_choose_equal_experts_when_recomputed():
    """Case 5: ties everywhere; saved or recomputed, the backward pass uses the experts of the forward pass."""
    name = "deepseek_nine_experts"
    data = batch(name) | {"tokens": np.full_like(batch(name)["tokens"], 3)}
    saved = gradients(name, Placement(), data)
    helpers.assert_finite(saved)
    helpers.assert_bit_equal(gradients(name, Placement(activations={"moe_chosen": "remat"}), data), saved)


def test_idle_experts_get_exactly_no_gradient_and_the_others_some():
    """Case 6, by the maximum of each expert: the selection bias keeps five of nine experts out of reach."""
    name, active = "deepseek_nine_experts", [0, 1, 3, 4]
    bias = np.full(9, -9.0, np.float32)
    bias[active] = 0
    edited = eqx.tree_at(lambda m: m.layers.blocks[1].moe.router.bias.value, model(name), bias)
    placed = place(edited, Placement(default="host"))
    gradient = unplace(value_and_gradient(total, placed, batch(name), options=FAST)[1])
    experts = gradient.layers.blocks[1].moe.experts
    for leaf in (experts.gate_proj, experts.up_proj, experts.down_proj):
        largest = np.abs(leaf).max(axis=(1, 2))
        assert (np.delete(largest, active) == 0).all()
        assert (largest[active] > 1e-6).all()
    assert gradient.layers.blocks[1].moe.router.bias.value is None


class Bend(eqx.Module):
    """A block of one's own."""

    weight: Array
    bent: Tag[Float[Array, "batch seq dim"]] = tag()

    def __init__(self, weight: Any):
        self.weight = weight
        name_tags(self, "bend")

    def __call__(self, x: Array) -> tuple[Array, None]:
        return x + jnp.sin(self.bent(x @ self.weight)), None


class Own(eqx.Module):
    layers: Stack

    def __call__(self, x: Array) -> Array:
        return self.layers(x)[0]


OWN = Own(Stack(tuple(Bend(helpers.normal(seed, 3, 3)) for seed in range(3))))
X = helpers.normal(9, 1, 2, 3)
OWN_EXAMPLE = (jax.ShapeDtypeStruct(X.shape, X.dtype),)


def squared(model: Any, x: Any) -> Array:
    return jnp.sum(jnp.square(model(x)))


@settings(max_examples=4)
@given(placements(OWN, OWN_EXAMPLE))
def test_the_kit_takes_modules_of_ones_own(placement: Placement):
    table = assert_saved(squared, placement, OWN, X, example=OWN_EXAMPLE)
    assert {cell.array_bytes for row in table.layers for cell in row.values()} == {2 * 3 * 4}
    found = assert_equivalent(squared, placement, OWN, X, example=OWN_EXAMPLE, tolerance=helpers.FLOAT32_MODEL)
    assert found.worst <= helpers.FLOAT32_MODEL


def places(model: Any) -> set[str]:
    """The places of a placed model's tags; of a canonical model, none."""
    return {place for run in getattr(model.layers, "runs", ()) for each in run.places for _, place in each}


@pytest.mark.parametrize("key", ["0", "1-2", "last"])
def test_the_kit_counts_runs_that_save_nothing(key: str):
    """A block of one's own need not save its input."""
    assert_saved(squared, Placement(layers={key: {"bend_bent": "host"}}), OWN, X, example=OWN_EXAMPLE)


class Switch(eqx.Module):
    layers: Stack

    def __call__(self, x: Array) -> Array:
        return self.layers(x, True)[0]


class Switched(eqx.Module):
    """A block with an argument that is no array."""

    bend: Bend

    def __call__(self, x: Array, on: bool) -> tuple[Array, None]:
        return self.bend(x) if on else (x, None)


def test_a_placed_model_takes_arguments_that_are_no_arrays():
    model = Switch(Stack(tuple(Switched(block) for block in OWN.layers.blocks)))
    assert_equivalent(squared, WRONG, model, X, example=OWN_EXAMPLE, tolerance=helpers.FLOAT32_MODEL)


WRONG = Placement(default="remat", layers={"1": {"bend_bent": "host"}})


def test_the_kit_sees_a_program_that_host_cells_change():
    def wrong(model: Any, x: Any) -> Array:
        return squared(model, x) * (1.0 + 1e-6 * ("host" in places(model)))

    with pytest.raises(AssertionError, match="host and device differ"):
        assert_equivalent(wrong, WRONG, OWN, X, example=OWN_EXAMPLE, tolerance=1.0)


def test_the_kit_sees_a_program_that_segments_change():
    def wrong(model: Any, x: Any) -> Array:
        return squared(model, x) + 1e-2 * bool(places(model)) * jnp.sum(model.layers.runs[-1].blocks[0].weight)

    def right(model: Any, x: Any) -> Array:
        return squared(model, x)

    expected = value_and_gradient(right, OWN, X)
    with pytest.raises(AssertionError, match=r"blocks\[2\]\.weight: the placed program differs from the canonical one"):
        assert_equivalent(wrong, WRONG, OWN, X, example=OWN_EXAMPLE, tolerance=1e-4, expected=expected)


def test_the_kit_leaves_the_model_alone():
    own = jax.tree.map(jnp.asarray, OWN)
    assert_equivalent(squared, WRONG, own, X, example=OWN_EXAMPLE, tolerance=1e-4)
    helpers.assert_bit_equal(own, OWN)


def test_the_difference_is_that_of_the_worst_leaf():
    expected = {"a": np.array([1.0, -4.0]), "b": np.array([0.5]), "c": np.zeros(2)}
    found = difference({"a": np.array([1.0, -3.9]), "b": np.array([0.51]), "c": np.zeros(2)}, expected)
    assert found.worst_leaf == "['a']"
    assert found.worst == pytest.approx(0.1 / 4)
    assert difference(expected, expected).worst == 0
    for wrong in (np.array([0.0, 1e-9]), np.array([np.nan, 0.0]), np.array([np.inf, 0.0])):
        found = difference(expected | {"c": wrong}, expected)
        assert (found.worst, found.worst_leaf) == (np.inf, "['c']")
