"""`recipes.policy` in a scan of one's own: activations used twice, square ones and their transposes, on the host."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from layers import Tag
from recipes import policy
from recipes.verify.jaxpr import saved
from tests import helpers
from zoo.checks import ConfigError

SIDE, LAYERS = 4, 3
mix: Tag = Tag("mix", Float[Array, "side side"])
square: Tag = Tag("square", Float[Array, "side side"])
turned: Tag = Tag("turned", Float[Array, "side side"])


def used_twice(x: Array, w: Array) -> tuple[Array, None]:
    """`x * m + (1 - m) * w`: the backward pass reads `m` in both terms."""
    m = mix(jax.nn.sigmoid(x @ w))
    return x * m + (1.0 - m) * w, None


def transposed(x: Array, w: Array) -> tuple[Array, None]:
    """A square activation and its transpose, both read by the backward pass."""
    a = square(jnp.tanh(x @ w))
    b = turned(a.T)
    return jnp.sin(a @ w) + jnp.cos(b @ w), None


BODIES = {"used_twice": (used_twice, {"mix"}), "transposed": (transposed, {"square", "turned"})}
X, W = helpers.normal(0, SIDE, SIDE), helpers.normal(1, LAYERS, SIDE, SIDE)


def loss(body: Callable, places: dict[str, str] | None) -> Callable[[Any, Any], Array]:
    """The sum of squares of a scan over layers; without places, everything is saved and nothing checkpointed."""

    def call(x: Any, w: Any) -> Array:
        step = body if places is None else jax.checkpoint(body, policy=policy(places), prevent_cse=False)
        return jnp.sum(jnp.square(jax.lax.scan(step, x, w)[0]))

    return call


@pytest.mark.parametrize(("body", "names"), BODIES.values(), ids=BODIES)
def test_host_equals_device_and_no_checkpoint(body: Callable, names: set[str]):
    """Case 4."""
    expected = jax.jit(jax.value_and_grad(loss(body, None), (0, 1)))(X, W)
    helpers.assert_finite(expected)
    found = {}
    for place in ("host", "device", "remat"):
        places = dict.fromkeys(names, place)
        program = jax.value_and_grad(loss(body, places), (0, 1))
        residuals = {(r.tag, r.place, r.layers, r.layer_bytes) for r in saved(jax.make_jaxpr(program)(X, W))}
        assert residuals == {(name, place, LAYERS, SIDE * SIDE * 4) for name in names if place != "remat"}
        found[place] = jax.jit(program)(X, W)
        helpers.assert_close(found[place], helpers.host(expected), helpers.FLOAT32)
    helpers.assert_bit_equal(found["host"], found["device"])


def test_each_name_has_a_place_of_its_own():
    program = jax.make_jaxpr(jax.grad(loss(transposed, {"square": "device", "turned": "host"})))(X, W)
    assert {(r.tag, r.place) for r in saved(program)} == {("square", "device"), ("turned", "host")}


@pytest.mark.parametrize("place", ["offload", "pinned_host", "on", ""])
def test_other_words_are_refused(place: str):
    with pytest.raises(ConfigError, match=rf"policy\[mix\]={place}: "):
        policy({"mix": place})
