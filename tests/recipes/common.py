"""What the tests of `recipes` share: tiny models, each made once, and the loss that placements are checked with."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest

import recipes.placement.resolve as resolving
import zoo
from recipes.placement.effect import savable
from recipes.step.loss import next_token_loss
from recipes.verify.equivalence import SAMPLES, Sample
from tests import helpers

# Of a test that draws placements: under the import hook beartype picks what it checks at random, in a strategy too.
BEARTYPE_DRAWS = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

# A tiny run of `zoo-train`.
QUICK = """
model=debug_llama model.dim=16 model.num_layers=2 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8
model.mlp_dim=16 train.steps=3 train.batch_size=2 train.sequence_length=8 train.validation_batches=0
train.sample_tokens=0
""".split()


def total(model: Any, batch: Any) -> jax.Array:
    """All parts of the loss, in more than one chunk."""
    return next_token_loss(model, batch, balance=0.1, z_loss=1e-2, mtp=0.3, chunk=3).total


@functools.cache
def abstract(name: str, **overrides: Any) -> Any:
    return zoo.abstract(SAMPLES[name].config, **overrides)


@functools.cache
def model(name: str, **overrides: Any) -> Any:
    """A sample's model in NumPy arrays: normal weights, norms and routing biases around one."""
    return helpers.host(helpers.drawn(lambda: abstract(name, **overrides)))


def batch(name: str, seed: int = 0) -> dict[str, Any]:
    """Random tokens, some of which are no targets, in two segments a sequence."""
    sample: Sample = SAMPLES[name]
    tokens = sample.batch(seed)["tokens"]
    positions = np.arange(tokens.shape[1], dtype=np.int32)
    mask = np.random.default_rng(seed + 1).random(tokens.shape) < 0.8
    mask[:, 1] = True  # a micro-batch without any target has no mean
    segments = np.broadcast_to(positions >= 3, tokens.shape).astype(np.int32)
    return {"tokens": tokens, "loss_mask": mask, "segment_ids": segments}


def lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, allowed to promote dtypes: optax raises floats to the power of integers. What calls it is not."""

    def allowed(function: Callable) -> Any:
        def call(*args: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):
                return function(*args)

        return call

    return optax.GradientTransformation(allowed(optimizer.init), allowed(optimizer.update))


def remembered(find: Callable) -> Callable:
    """`savable` that traces each model of this file once for each size of batch."""
    known: dict[Any, Any] = {}

    def find_once(model: Any, example: Sequence[Any]) -> Any:
        sizes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model))
        key = (jax.tree.structure(model), sizes, tuple(example))
        if key not in known:
            known[key] = find(model, example)
        return known[key]

    return find_once


@pytest.fixture(scope="module")
def savable_once() -> Iterator[None]:
    """`resolve` with a memory, for tests that resolve many placements of few models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "savable", remembered(savable))
        yield
