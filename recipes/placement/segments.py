"""Runs of layers with equal rows, each one scan under its own policy: the layout that the train step works on."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from layers.nodes import map_nodes
from layers.stack import Stack, unstack
from layers.tag import fence
from recipes.placement.hosted import fetched, move, on_host, stack_on_host
from recipes.placement.policy import policy
from recipes.placement.state import StatePlacement
from recipes.sharding.rules import at_use, constrain_hidden
from recipes.sharding.spread import gather

ON_DEVICE = StatePlacement()
Places = tuple[tuple[str, str], ...]  # (tag, place) of one layer, in order of appearance; hashable


class Run(eqx.Module):
    """Consecutive layers from `first` on, executed by one scan of `length` steps.

    A step is one layer, or `len(blocks)` of them if a pattern of rows repeats. `blocks` holds for each layer of the
    step the blocks of all steps, stacked along a leading dim, and `places` where its tags live; `mesh` is what splits
    weights and hidden states. Weights on the host are fetched step by step. `sources`: where `blocks` are but the
    landings of gradients (`recipes.placement.hosted.fetched`), the arrays to fetch, in order of the leaves, else None.
    """

    blocks: tuple[PyTree[Array, "..."], ...]
    places: tuple[Places, ...] = eqx.field(static=True)
    first: int = eqx.field(static=True)
    length: int = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True, default=None)
    sources: tuple[tuple[Array | None, ...], ...] | None = None

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.length * len(self.blocks))

    def __call__(self, x: Float[Array, "batch seq dim"], *args: Any) -> tuple[Float[Array, "batch seq dim"], PyTree]:
        return _scan(self.places, self.length, self.mesh, self.blocks, self.sources, x, *args)


@eqx.filter_jit
def _scan(
    places: tuple[Places, ...],
    length: int,
    mesh: Mesh | None,
    blocks: tuple[PyTree, ...],
    sources: tuple[tuple[Array | None, ...], ...] | None,
    x: Any,
    *args: Any,
) -> Any:
    """Jitted, so that runs of equal rows and lengths share one trace. What is no array in `args` stays what it is."""

    def apply(x, block, source):
        block = _fetch(block, source)
        x, aux = block(x, *args) if mesh is None else at_use(block, mesh)(constrain_hidden(x, mesh), *args)
        return x if mesh is None else constrain_hidden(x, mesh), aux

    steps = [jax.checkpoint(apply, policy=policy(dict(each)), prevent_cse=False) for each in places]

    def body(x, weights):
        reports = []
        for step, block, source in zip(steps, *weights, strict=True):
            x, aux = step(x, block, source)
            reports.append(aux)
        return x, reports

    # The slice of a stack of one is a mere reshape, and XLA folds `reshape(copy(reshape(host array)))` into one
    # reshape that crosses memory spaces: the compiler then fails. A fence behind each tag keeps the copy.
    blocks = fence(blocks) if length == 1 else blocks
    # A scan even for one layer: without the loop XLA drops or delays the copies to the host.
    x, reports = jax.lax.scan(body, x, (blocks, sources or (None,) * len(blocks)))
    return x, jax.tree.map(_interleave, *reports)


def _fetch(block: PyTree, source: tuple[Array | None, ...] | None) -> PyTree:
    """One layer's weights on the device."""
    leaves, structure = jax.tree.flatten(block)
    sources = (None,) * len(leaves) if source is None else source
    pairs = zip(sources, leaves, strict=True)
    return jax.tree.unflatten(structure, [fetched(leaf if a is None else a, leaf) for a, leaf in pairs])


def _interleave(*parts: Array) -> Array:
    """What the layers of a step report, each over all steps, in the order of the layers."""
    return parts[0] if len(parts) == 1 else jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


def is_run(node: object) -> bool:
    """Whether a node of a tree is a run of layers."""
    return isinstance(node, Run)


class PlacedStack(eqx.Module):
    """A `Stack` as runs; same call. What a run reports has a leading dim of its layers.

    `state`: where the arrays of these runs, their gradients and moments live.
    """

    runs: tuple[Run, ...]
    state: StatePlacement = eqx.field(static=True, default=ON_DEVICE)

    def __call__(self, x: Float[Array, "batch seq dim"], *args: Any) -> tuple[Float[Array, "batch seq dim"], tuple]:
        reports = []
        for run in self.runs:
            x, aux = run(x, *args)
            reports.append(aux)
        return x, tuple(reports)


def map_stacks(change: Callable[[Stack], Any], model: PyTree) -> PyTree:
    """The model with every canonical stack replaced."""
    return map_nodes(change, model, Stack)


def placed_stacks(model: PyTree) -> list[PlacedStack]:
    """The stacks of a placed model, in order."""
    leaves = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, PlacedStack))
    return [leaf for leaf in leaves if isinstance(leaf, PlacedStack)]


def runs_of(blocks: Sequence[eqx.Module], rows: Sequence[Any], group: int = 1) -> list[tuple[range, int]]:
    """Consecutive layers that one scan executes, and how many of them a step takes.

    A step takes one layer where rows and structures (fields, shapes, dtypes) stay equal; up to `group` where a pattern
    of that many rows repeats and so covers more layers.
    """
    kinds = [(row, structure(block)) for row, block in zip(rows, blocks, strict=True)]
    runs, first = [], 0
    while first < len(kinds):
        periods = range(1, max(1, min(group, (len(kinds) - first) // 2)) + 1)
        period = max(periods, key=lambda period: (_covered(kinds, first, period), -period))
        last = first + _covered(kinds, first, period)
        runs.append((range(first, last), period))
        first = last
    return runs


def _covered(kinds: Sequence[tuple[Any, Any]], first: int, period: int) -> int:
    """How many layers from `first` on repeat the first `period` ones; 0 if these are no pattern of alike blocks."""
    pattern, last = kinds[first : first + period], first
    if any(kind != pattern[0][1] for _, kind in pattern):
        return 0
    while kinds[last : last + period] == pattern:
        last += period
    return last - first if period == 1 or last - first > period else 0


def structure(block: PyTree) -> Any:
    """What two blocks must share to be layers of one scan."""
    leaves, treedef = jax.tree.flatten(block)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def place_stack(
    stack: Stack,
    rows: Sequence[tuple[Mapping[str, str], tuple]],
    first: int = 0,
    group: int = 1,
    mesh: Mesh | None = None,
    state: StatePlacement = ON_DEVICE,
) -> PlacedStack:
    """Stacks the blocks run by run; `rows` holds each layer's tag -> place and what else keeps it apart from others.

    `first` is the number of the first layer, `mesh` what splits the arrays, `state` where these are to live.
    """
    kinds: list[tuple[Places, tuple]] = [(tuple(row.items()), label) for row, label in rows]
    runs = []
    for layers, period in runs_of(stack.blocks, kinds, group):
        steps = [layers[i::period] for i in range(period)]
        blocks = tuple(jax.tree.map(_stack, *(stack.blocks[layer] for layer in step)) for step in steps)
        pattern = tuple(kinds[step[0]][0] for step in steps)
        runs.append(Run(blocks, pattern, first + layers[0], len(layers) // period, mesh))
    return PlacedStack(tuple(runs), state)


def unplace(placed: PyTree) -> PyTree:
    """The canonical model again: one block a layer. Exact inverse of `recipes.place`."""

    def blocks(run: Run) -> Iterator[PyTree]:
        for step in zip(*(_unstack(blocks, run.length) for blocks in run.blocks), strict=True):
            yield from step

    def change(stack: PlacedStack) -> Stack:
        return Stack(tuple(block for run in stack.runs for block in blocks(run)))

    return gather(map_nodes(change, placed, PlacedStack))


def outside_at_hand(placed: PyTree) -> PyTree:
    """The placed model with all that stands outside its segments on the device; segments fetch layer by layer."""
    return jax.tree.map(
        lambda node: node if is_run(node) else move(node, "device"),
        placed,
        is_leaf=is_run,
    )


def rest_at_use(placed: PyTree, mesh: Mesh) -> PyTree:
    """The placed model with all that stands outside its segments as it is used; segments see to that step by step."""

    def outside(node: Any) -> PyTree:
        return jax.tree.map(lambda _: not isinstance(node, PlacedStack), node)

    mask = jax.tree.map(outside, placed, is_leaf=lambda node: isinstance(node, PlacedStack))
    rest, stacks = eqx.partition(placed, mask)
    return eqx.combine(at_use(rest, mesh), stacks)


def replace_places(placed: PyTree, change: Callable[[str], str]) -> PyTree:
    """The same segments with other places: `replace_places(placed, lambda place: "device")` is the all-device twin."""

    def change_stack(stack: PlacedStack) -> PlacedStack:
        def changed(run: Run) -> Run:
            places = tuple(tuple((tag, change(place)) for tag, place in each) for each in run.places)
            return dataclasses.replace(run, places=places)

        return PlacedStack(tuple(changed(run) for run in stack.runs), stack.state)

    return map_nodes(change_stack, placed, PlacedStack)


def replace_state(tree: PyTree, state: StatePlacement) -> PyTree:
    """The same segments, whose arrays are to be where `state` says; `recipes.step.state.settled_state` moves them."""
    return map_nodes(lambda stack: PlacedStack(stack.runs, state), tree, PlacedStack)


def _stack(*leaves: Array) -> Array:
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)  # type: ignore[return-value]
    if isinstance(first, np.ndarray):
        return np.stack(leaves)  # type: ignore[return-value]
    if isinstance(first, jax.core.Tracer):
        return jnp.stack(leaves)
    stacked = stack_on_host(leaves) if on_host(first) else jnp.stack(leaves)
    for leaf in leaves:  # `place` donates: never two copies of more than one leaf
        if isinstance(leaf, jax.Array):
            leaf.delete()
    return stacked


def _unstack(blocks: PyTree, length: int) -> list[PyTree]:
    """One tree a layer. Slices of what is on the host are cut by a program: JAX indexes no host array."""
    if not any(on_host(leaf) for leaf in jax.tree.leaves(blocks)):
        return unstack(blocks, length)
    return [jax.tree.map(lambda leaf, layer=layer: _cut(leaf, layer), blocks) for layer in range(length)]


@jax.jit
def _cut(leaf: Array, layer: int) -> Array:
    return jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
