"""Models by name or configuration: built, abstract, counted."""

import importlib
import math
from typing import Any

import equinox as eqx
import jax
import jax.core
from jaxtyping import PRNGKeyArray

from zoo.base import Decoder
from zoo.registry import ModelConfig, config, family_of

# Drawing the values runs once: compile it fast (4.8 s to 1.7 s for debug_deepseek) rather than well.
INIT_OPTIONS = {"xla_backend_optimization_level": 0}


def build(model: str | ModelConfig, *, key: PRNGKeyArray, **overrides: Any) -> Decoder:
    """The canonical model, float32, one block a layer: `build("debug_llama", key=key, num_layers=4)`.

    The values depend on the key and the layer only. Raises ConfigError for an unknown name or field.
    """
    resolved = config(model, **overrides)

    def construct(key: PRNGKeyArray) -> Decoder:
        return _construct(resolved, key)

    if isinstance(key, jax.core.Tracer):  # an outer jit brings its own options
        return construct(key)
    return jax.jit(construct, compiler_options=INIT_OPTIONS)(key)


def abstract(model: str | ModelConfig, **overrides: Any) -> Decoder:
    """The model with `jax.ShapeDtypeStruct`s for leaves; no array is made."""
    resolved = config(model, **overrides)
    return eqx.filter_eval_shape(lambda: _construct(resolved, jax.random.key(0)))


def count_parameters(model: str | ModelConfig, **overrides: Any) -> int:
    """Number of parameters, embeddings and routing biases included; no array is made."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract(model, **overrides)))


def _construct(config: ModelConfig, key: PRNGKeyArray) -> Decoder:
    family = family_of(config)
    return getattr(importlib.import_module(f"zoo.{family}.model"), family)(config, key=key)
