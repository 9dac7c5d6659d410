"""What is known of a step of ours before it is compiled: which arrays it keeps, in which sizes, and where."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from layers.axes import logical_axes
from recipes.placement.segments import placed_stacks
from recipes.placement.show import layers_word
from recipes.plan.flops import Loop, Named, Work
from recipes.plan.memory import Kept, Known, dims_of, local_shape
from recipes.setup import Setup
from recipes.sharding.rules import BATCH, RULES_AT_USE, SEQUENCE, shardings
from recipes.step.state import TrainState


def known_of(setup: Setup, state: TrainState, work: Work) -> Known:
    """The activations that the segments keep, and the dims of parameters at rest and at work."""
    leaves = [leaf for leaf in jax.tree.leaves(state.params) if leaf.ndim > 1]
    return Known(
        kept=tuple(_kept(setup, state, work.named)),
        params=frozenset(dims_of(local_shape(leaf)) for leaf in leaves),
        gathered=frozenset(_at_work(setup, state)),
    )


def kept_anywhere(work: Work) -> tuple[Kept, ...]:
    """The tagged arrays of loops over layers of any program, which may turn up on the device or on the host."""
    found: list[Kept] = []
    seen: set[str] = set()
    for number, loop in enumerate(work.loops):
        for named in sorted(work.named, key=lambda named: (named.tag, named.shape)):
            if named.tag in loop.tags - seen:
                elements = frozenset({math.prod(named.shape)})
                layers = f"loop {number}"
                found += [
                    Kept(named.tag, layers, loop.length, place, elements, named.dtype) for place in ("device", "host")
                ]
        seen |= loop.tags
    return tuple(found)


def forward_loops(setup: Setup, state: TrainState, work: Work) -> tuple[list[Loop], list[Loop]]:
    """The loops of the forward pass, one a segment, and those of the backward pass."""
    segments = sum(len(stack.runs) for stack in placed_stacks(state.params))
    return work.loops[:segments], work.loops[segments:]


def _kept(setup: Setup, state: TrainState, named: Iterable[Named]) -> Iterator[Kept]:
    arrays: dict[str, list[Named]] = {}
    for each in sorted(named, key=lambda each: (each.tag, each.shape)):
        arrays.setdefault(each.tag, []).append(each)
    for stack in placed_stacks(state.params):
        for run in stack.runs:
            for position, places in enumerate(run.places):
                layers = layers_word(list(run.layers)[position :: len(run.places)])
                for tag, place in places:
                    for array in arrays.get(tag, []) if place in ("device", "host") else ():
                        yield Kept(tag, layers, run.length, place, _elements(setup, array), array.dtype)


def _elements(setup: Setup, array: Named) -> frozenset[int]:
    """Of one layer's array on one device; XLA splits heads and hidden dims by `tensor`, other dims not."""
    total = math.prod(array.shape)
    if array.local or setup.mesh is None:
        return frozenset({total})
    data = math.prod(setup.mesh.shape[axis] for axis in (*BATCH, SEQUENCE))
    return frozenset(total // parts for parts in (data, data * setup.mesh.shape["tensor"]) if total % parts == 0)


def _at_work(setup: Setup, state: TrainState) -> Iterator[tuple[int, ...]]:
    """Dims of the weights as a layer computes with them, whole along the axes that split the batch."""
    params: Any = state.params
    leaves, names = jax.tree.leaves(params), logical_axes(params)
    if setup.mesh is None:
        shapes = [leaf.shape for leaf in leaves]
    else:
        used = jax.tree.leaves(shardings(params, setup.mesh, RULES_AT_USE))
        shapes = [sharding.shard_shape(leaf.shape) for leaf, sharding in zip(leaves, used, strict=True)]
    for shape, dims in zip(shapes, names, strict=True):
        if len(dims) > 1:
            yield dims_of(shape[len(shape) - len(dims) :])
