"""What a step moves between a device and its host."""

from collections.abc import Mapping
from typing import Any

import jax

from layers.buffer import split_buffers
from recipes.placement.gradients import landing_on_host
from recipes.placement.hosted import on_host
from recipes.placement.segments import is_run
from recipes.plan.memory import local_bytes
from recipes.plan.record import Traffic
from recipes.plan.targets import Target
from recipes.setup import Setup
from recipes.step.state import TrainState, split_trainable

Moved = dict[str, tuple[int, int]]  # part -> bytes to the host, bytes to the device


def traffic(moved: Moved, target: Target) -> dict[str, Traffic]:
    """The bytes with the seconds that the target's link needs for them."""
    to_host, to_device = target.to_host_bytes_per_s, target.to_device_bytes_per_s
    return {part: Traffic(out, back, out / to_host, back / to_device) for part, (out, back) in moved.items()}


def moved_activations(host_parts: Mapping[str, int], times: int = 1) -> Moved:
    """Each activation on the host goes there once and comes back once, in each of the step's micro-batches."""
    moved: Moved = {}
    for part, size in host_parts.items():
        if part.startswith("activations/"):
            tag = part.split("/")[1]
            there = moved.get(tag, (0, 0))[0] + size * times
            moved[tag] = there, there
    return moved


def moved_state(setup: Setup, state: TrainState) -> Moved:
    """What of the state goes over the link in a step, by part.

    Parameters of a layer are fetched in the forward and in the backward pass of each micro-batch, those outside of
    layers once; they come back from the update, which fetches them again only where they are their own masters. Masters
    and moments go there and back once. A gradient goes to the host once and is read twice, for the norm and for the
    update; where micro-batches add up, each of them moves it out, reads it and the sum, and writes the sum.
    """
    times, trainable = setup.config.train.accumulate, split_trainable(state.params, setup.frozen)[0]
    moved = {"parameters": (0, 0), "masters": (0, 0), "moments": (0, 0), "gradients": (0, 0)}

    def add(part: str, size: int, out: int, back: int) -> None:
        moved[part] = (moved[part][0] + out * size, moved[part][1] + back * size)

    for leaf, in_layer in _with_layers(split_buffers(state.params)[0]):
        if on_host(leaf):
            add("parameters", local_bytes(leaf), 0, times * (2 if in_layer else 1))
    for leaf in filter(on_host, jax.tree.leaves(trainable)):
        add("parameters", local_bytes(leaf), 1, 1 if state.master is None else 0)
    for part, tree in {"masters": state.master, "moments": state.opt_state}.items():
        for leaf in filter(on_host, jax.tree.leaves(tree)):
            add(part, local_bytes(leaf), 1, 1)
    for leaf in landing_on_host(trainable, state.params):
        size = local_bytes(leaf)
        add("gradients", size, times, 2 if times == 1 else times)
        if times > 1:  # sums are float32
            add("gradients", size * 4 // leaf.dtype.itemsize, times, times + 2)
    return {part: each for part, each in moved.items() if any(each)}


def _with_layers(tree: Any) -> list[tuple[Any, bool]]:
    nodes = jax.tree.leaves(tree, is_leaf=is_run)
    return [(leaf, is_run(node)) for node in nodes for leaf in jax.tree.leaves(node)]
