"""Masks and labels of optax, given on canonical paths, for the parameters of a placed model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from layers.stack import Stack
from recipes.placement.segments import PlacedStack, Run, map_stacks, placed_stacks, unplace
from zoo.checks import ConfigError


def canonical_mask(mask: PyTree | Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """A mask or labels of the canonical model, as the function of placed parameters that optax takes.

    `mask` has the structure of the canonical model, one block a layer, or is a function that makes it from the
    canonical parameters (as `jax.ShapeDtypeStruct`s):

        def frozen(params):
            return jax.tree.map_with_path(lambda path, _: "embedding" in jax.tree_util.keystr(path), params)

        optimizer = optax.chain(optax.adam(1e-3), optax.masked(optax.set_to_zero(), recipes.canonical_mask(frozen)))

    The layers of one segment share an array and hence a label. Where a mask tells layers apart, place the model with
    `recipes.place(model, placement, apart=mask)`. Raises ConfigError naming the layers that would need it.
    """

    def placed_mask(params: PyTree) -> PyTree:
        canonical = jax.eval_shape(unplace, params)
        found = iter(placed_stacks(params))
        given = mask if isinstance(mask, eqx.Module) else mask(canonical)  # a tree of a module's structure is callable
        return map_stacks(lambda stack: _place(stack, next(found)), given)

    return placed_mask


def _place(stack: Stack, like: PlacedStack) -> PlacedStack:
    start = like.runs[0].first

    def run(like: Run) -> Run:
        steps = [like.layers[i :: len(like.blocks)] for i in range(len(like.blocks))]
        blocks = tuple(jax.tree.map(_same(step), *(stack.blocks[layer - start] for layer in step)) for step in steps)
        return dataclasses.replace(like, blocks=blocks)

    return PlacedStack(tuple(run(each) for each in like.runs), like.state)


def _same(layers: range) -> Callable[..., Any]:
    def check(*labels: Any) -> Any:
        if any(label != labels[0] for label in labels):
            raise ConfigError(
                "mask",
                f"{labels[0]} in layer {layers[0]}",
                f"layers {', '.join(map(str, layers))} share an array and need one label",
                hint="recipes.place(model, placement, apart=mask) keeps layers of different labels apart",
            )
        return labels[0]

    return check
