"""Runs of layers with equal rows, each one scan under its own policy: the layout that the train step works on."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from layers.stack import Stack, unstack
from layers.tag import fence
from recipes.placement.policy import policy

Places = tuple[tuple[str, str], ...]  # (tag, place) of one layer, in order of appearance; hashable


class Run(eqx.Module):
    """Layers `first` to `first + length - 1`: their blocks stacked along a leading dim, and where their tags live."""

    blocks: PyTree[Array, "..."]
    places: Places = eqx.field(static=True)
    first: int = eqx.field(static=True)
    length: int = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch seq dim"], *args: Any) -> tuple[Float[Array, "batch seq dim"], PyTree]:
        return _scan(self.places, self.length, self.blocks, x, *args)


@partial(jax.jit, static_argnums=(0, 1))
def _scan(places: Places, length: int, blocks: PyTree, x: Any, *args: Any) -> Any:
    def body(x, block):
        return block(x, *args)

    # The slice of a stack of one is a mere reshape, and XLA folds `reshape(copy(reshape(host array)))` into one
    # reshape that crosses memory spaces: the compiler then fails. A fence behind each tag keeps the copy.
    blocks = fence(blocks) if length == 1 else blocks
    checkpointed = jax.checkpoint(body, policy=policy(dict(places)), prevent_cse=False)
    # A scan even for one layer: without the loop XLA drops or delays the copies to the host.
    return jax.lax.scan(checkpointed, x, blocks)


class PlacedStack(eqx.Module):
    """A `Stack` as runs; same call. What a run reports has a leading dim of its layers."""

    runs: tuple[Run, ...]

    def __call__(self, x: Float[Array, "batch seq dim"], *args: Any) -> tuple[Float[Array, "batch seq dim"], tuple]:
        reports = []
        for run in self.runs:
            x, aux = run(x, *args)
            reports.append(aux)
        return x, tuple(reports)


def map_stacks(change: Callable[[Stack], Any], model: PyTree) -> PyTree:
    """The model with every canonical stack replaced."""
    return _map_nodes(change, model, Stack)


def runs_of(blocks: Sequence[eqx.Module], rows: Sequence[Any]) -> list[range]:
    """Consecutive layers that share a row and a structure (fields, shapes, dtypes), as ranges."""
    kinds = [(row, structure(block)) for row, block in zip(rows, blocks, strict=True)]
    starts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
    return [range(first, last) for first, last in zip(starts, [*starts[1:], len(kinds)], strict=True)]


def structure(block: PyTree) -> Any:
    """What two blocks must share to be layers of one scan."""
    leaves, treedef = jax.tree.flatten(block)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def place_stack(stack: Stack, rows: Sequence[Mapping[str, str]], first: int = 0) -> PlacedStack:
    """Stacks the blocks run by run; `rows` holds tag -> place of each layer, `first` the number of the first one."""
    places: list[Places] = [tuple(row.items()) for row in rows]
    runs = []
    for layers in runs_of(stack.blocks, places):
        blocks = jax.tree.map(_stack, *(stack.blocks[i] for i in layers))
        runs.append(Run(blocks, places[layers[0]], first + layers[0], len(layers)))
    return PlacedStack(tuple(runs))


def unplace(placed: PyTree) -> PyTree:
    """The canonical model again: one block a layer. Exact inverse of `recipes.place`."""

    def change(stack: PlacedStack) -> Stack:
        return Stack(tuple(block for run in stack.runs for block in unstack(run.blocks, run.length)))

    return _map_nodes(change, placed, PlacedStack)


def replace_places(placed: PyTree, change: Callable[[str], str]) -> PyTree:
    """The same segments with other places: `replace_places(placed, lambda place: "device")` is the all-device twin."""

    def change_stack(stack: PlacedStack) -> PlacedStack:
        def changed(run: Run) -> Run:
            return Run(run.blocks, tuple((tag, change(place)) for tag, place in run.places), run.first, run.length)

        return PlacedStack(tuple(changed(run) for run in stack.runs))

    return _map_nodes(change_stack, placed, PlacedStack)


def _map_nodes(change: Callable, tree: PyTree, kind: type) -> PyTree:
    def is_kind(node: object) -> bool:
        return isinstance(node, kind)

    return jax.tree.map(lambda node: change(node) if is_kind(node) else node, tree, is_leaf=is_kind)


def _stack(*leaves: Array) -> Array:
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)  # type: ignore[return-value]
    stacked = jnp.stack(leaves)
    for leaf in leaves:  # `place` donates: never two copies of more than one leaf
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            leaf.delete()
    return stacked
