"""Which optimizers may be applied layer by layer, and that the others are named where they would have to be."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import recipes
from recipes import OptimizerConfig, Placement, make_optimizer, make_train_step, place
from recipes.optim import clip_by_global_norm
from recipes.step.elementwise import not_elementwise
from tests.recipes.common import abstract
from zoo.checks import ConfigError

PARAMS = {
    "matrix": jax.ShapeDtypeStruct((4, 130, 140), jnp.bfloat16),
    "vector": jax.ShapeDtypeStruct((3,), jnp.float32),
}

ELEMENTWISE = {
    "adamw": optax.adamw(1e-3),
    "of a recipe": make_optimizer(OptimizerConfig(), 10),
    "with narrow moments": make_optimizer(OptimizerConfig(moment_dtype="bfloat16"), 10),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9),
    "adagrad, by a schedule": optax.adagrad(optax.linear_schedule(1e-2, 0.0, 10)),
    "clipped by value": optax.chain(optax.clip(1.0), optax.sgd(1e-2)),
    "clipped by the norm that is given": optax.chain(clip_by_global_norm(1.0), optax.adam(1e-3)),
}
# What lets one number depend on another -> the names that are said.
OTHERS: dict[str, tuple[Any, list[str]]] = {
    "adafactor": (optax.adafactor(1e-3), ["scale_by_factored_rms", "clip_by_block_rms", "scale_by_param_block_rms"]),
    "lamb": (optax.lamb(1e-3), ["scale_by_trust_ratio"]),
    "lars": (optax.lars(1e-3), ["masked"]),
    "clipped by its own norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        ["clip_by_global_norm"],
    ),
    "one alone": (optax.scale_by_trust_ratio(), ["scale_by_trust_ratio"]),
    "a chain in a chain": (
        optax.chain(optax.chain(optax.adaptive_grad_clip(0.1), optax.clip(1.0)), optax.sgd(1e-2)),
        ["adaptive_grad_clip"],
    ),
}


@pytest.mark.parametrize("optimizer", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise(optimizer: Any):
    assert not_elementwise(optimizer, PARAMS) == []


@pytest.mark.parametrize(("optimizer", "names"), OTHERS.values(), ids=OTHERS)
def test_not_elementwise_and_named(optimizer: Any, names: list[str]):
    assert not_elementwise(optimizer, PARAMS) == names


@pytest.mark.parametrize("name", ["one alone", "clipped by its own norm"])
def test_a_step_with_state_on_the_host_refuses_them(name: str):
    """While tracing: nothing is compiled. With all on the device they get whole arrays, and are not refused."""
    optimizer, names = OTHERS[name]
    placed = place(abstract("llama_one_layer"), Placement(state={"params": "host"}))  # type: ignore[arg-type]
    batch = {"tokens": jax.ShapeDtypeStruct((2, 6), jnp.int32)}
    step: Any = make_train_step(optimizer)

    def traced(placed: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            state = jax.eval_shape(lambda placed: recipes.init_state(placed, optimizer), placed)
            return step.trace(state, batch)

    with pytest.raises(ConfigError) as error:
        traced(placed)
    assert str(error.value).startswith(f"placement.state=host: {', '.join(names)} needs whole arrays")
    if name != "one alone":
        assert "recipes.optim.clip_by_global_norm in its place" in str(error.value)
    assert name == "one alone" or traced(place(abstract("llama_one_layer"), Placement()))
