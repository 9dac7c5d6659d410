"""From `placement.state` to the arrays of a training state: the place of each, and moving them there."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from layers.buffer import split_buffers
from layers.stack import Stack
from recipes.placement.hosted import KINDS, move
from recipes.placement.segments import Run, placed_stacks
from recipes.placement.state import DEFAULT, GROUPS, StatePlacement, is_part
from zoo.checks import ConfigError
from zoo.paths import path_name

_NO_PARTS = frozenset({"layers", "blocks", "runs", "weight", "value"})  # on the path of nearly everything


class Described(NamedTuple):
    """An array of a model or of what has its structure: the names on its path, and its layer (None: outside)."""

    leaf: Any
    names: tuple[str, ...]
    layer: int | None


def describe(tree: PyTree) -> Iterator[Described]:
    """The arrays of a model, canonical or placed, or of a tree with such models in it, in order."""
    layer = 0
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Run | Stack)):
        outer = _names(path)
        if isinstance(node, Run):
            for position, block in enumerate(node.blocks):
                yield from _block(block, outer, node.layers[position])
        elif isinstance(node, Stack):
            for block in node.blocks:
                yield from _block(block, outer, layer)
                layer += 1
        else:
            yield Described(node, outer, None)


def places(tree: PyTree, kind: str, state: StatePlacement, num_layers: int) -> PyTree:
    """The tree, of one kind (`params`, `master`, `gradients`, `optimizer`), with the place of each array in its stead.

    Numbers without dims, such as an optimizer's count of steps, stay on the device.
    """
    each = describe(tree)
    found = [state.place(kind, names, layer, num_layers) if leaf.ndim else "device" for leaf, names, layer in each]
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def places_in(tree: PyTree, kind: str, placed: PyTree) -> PyTree:
    """The tree with the place of each array in its stead, by the placement of a placed model.

    Without segments all is on the device.
    """
    stacks = placed_stacks(placed)
    state = stacks[0].state if stacks else StatePlacement()
    if not state.anything_on_host:
        return _all_on_device(tree)
    num_layers = sum(len(run.layers) for stack in stacks for run in stack.runs)
    return places(tree, kind, state, num_layers)


def places_in_model(placed: PyTree) -> PyTree:
    """The place of each array of a placed model, in its stead; buffers stay on the device."""
    params, buffers = split_buffers(placed)
    return eqx.combine(places_in(params, "params", placed), _all_on_device(buffers))


def settled(tree: PyTree, wanted: PyTree) -> PyTree:
    """The tree with each array on its place, traced, abstract or moved there."""
    return jax.tree.map(move, tree, wanted)


def with_kinds(shardings: PyTree, model: PyTree, state: StatePlacement) -> PyTree:
    """Shardings of a canonical model's parameters with the kinds of memory that these are to be in, at hand."""
    params, buffers = split_buffers(model)
    num_layers = sum(layer is not None for layer in {layer for _, _, layer in describe(model)})
    wanted = eqx.combine(places(params, "params", state, num_layers), _all_on_device(buffers))
    return jax.tree.map(lambda place, each: each.with_memory_kind(KINDS[place]), wanted, shardings)


def check_parts(tree: PyTree, kind: str, state: StatePlacement) -> None:
    """Raises ConfigError for what is said of a part of which the tree has no array, with the nearest name."""
    known = [names for _, names, _ in describe(tree)]
    allowed = dict.fromkeys([*GROUPS, DEFAULT, *(name for names in known for name in names if name not in _NO_PARTS)])
    for entry in (entry for entry in state.entries() if entry.kind == kind):
        for part in entry.names:
            if not any(is_part(part, names) for names in known):
                raise ConfigError(entry.key, entry.place, f"no {part} in the {kind}", allowed=allowed, name=part)
        if not any(all(is_part(part, names) for part in entry.names) for names in known):
            raise ConfigError(entry.key, entry.place, f"no array of the {kind} is in {' and '.join(entry.names)}")


def _all_on_device(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda _: "device", tree)


def _block(block: PyTree, outer: tuple[str, ...], layer: int) -> Iterator[Described]:
    for path, leaf in jax.tree.leaves_with_path(block):
        yield Described(leaf, (*outer, *_names(path)), layer)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(name for name in path_name(path).split(".") if name and not name.isdigit())
