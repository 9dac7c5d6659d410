"""Which mesh axes split which dims: the one table, and the shardings that follow from it."""

import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from layers.axes import Dims, logical_axes
from recipes.placement.hosted import abstract, kind_of, place_of
from zoo.checks import ConfigError
from zoo.paths import path_name

# Logical axis (`layers.axes`) -> the mesh axes that split it at rest. Devices along `expert` hold other sequences, so
# for all but the experts themselves that axis is one more of `fsdp`.
RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": ("fsdp", "expert"),
    "rank": ("fsdp", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "expert_embed": ("fsdp",),
}
# Where a layer computes, its weights are whole along the axes that split the batch (ZeRO 3).
RULES_AT_USE = RULES | {"embed": (), "rank": (), "expert_embed": ()}
BATCH, SEQUENCE = ("replica", "fsdp", "expert"), "context"


def shardings(tree: PyTree, mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = RULES) -> PyTree:
    """The sharding of every array of a model, gradients, masters, moments or a whole state; the rest is replicated.

    Raises ConfigError if a mesh axis does not divide a dim that it splits, ValueError if two dims of one array would be
    split by one mesh axis.
    """
    leaves, structure = jax.tree.flatten_with_path(tree)
    named = zip(leaves, logical_axes(tree), strict=True)
    specs = [_spec(path_name(path), leaf.shape, dims, mesh, rules) for (path, leaf), dims in named]
    return jax.tree.unflatten(structure, [NamedSharding(mesh, spec) for spec in specs])


def constrain(tree: PyTree, mesh: Mesh | None, rules: Mapping[str, tuple[str, ...]] = RULES) -> PyTree:
    """The tree under its shardings, traced, abstract or moved there; itself without a mesh."""
    return tree if mesh is None else jax.tree.map(_constrain, tree, shardings(tree, mesh, rules))


def at_use(block: PyTree, mesh: Mesh) -> PyTree:
    """The weights of a layer as it computes with them, their gradients in the parts of `RULES`.

    Traced inside a checkpoint, weights are gathered in both passes. Gradients are split where they come up: a mere
    constraint of the weights would hold for the gradients too, and each device would first sum them whole.
    """
    leaves, structure = jax.tree.flatten(block)
    wholes, parts = (jax.tree.leaves(shardings(block, mesh, rules)) for rules in (RULES_AT_USE, RULES))
    named = zip(leaves, wholes, parts, logical_axes(block), strict=True)
    return jax.tree.unflatten(
        structure, [_gathered(leaf, whole, _on_the_way(whole, part, dims)) for leaf, whole, part, dims in named]
    )


def constrain_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """Arrays `[batch, seq + 1]`: the sequence has one token too many to be split."""
    return jax.tree.map(lambda leaf: _constrain(leaf, NamedSharding(mesh, PartitionSpec(BATCH))), batch)


def constrain_hidden(x: Array, mesh: Mesh) -> Array:
    """Hidden states `[batch, seq, dim]`; a batch or sequence that does not divide, such as a sample's, stays whole."""
    spec = [axes if n % size == 0 else None for n, size, axes in _splits(x, mesh)]
    return _constrain(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _on_the_way(whole: NamedSharding, part: NamedSharding, dims: Dims) -> tuple[NamedSharding, ...]:
    """What a weight's gradient is constrained to, one after the other.

    Rows of an embedding are scattered over a split vocabulary: were they split too, XLA would first give every device
    the hidden states of all.
    """
    return (whole, part) if dims and dims[0] == "vocab" else (part,)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(leaf: Any, whole: NamedSharding, slopes: tuple[NamedSharding, ...]) -> Any:
    """`leaf` under `whole`, its gradient under `slopes`, one after the other."""
    return _constrain(leaf, whole)


def _gather(leaf: Any, whole: NamedSharding, slopes: tuple[NamedSharding, ...]) -> Any:
    return _constrain(leaf, whole), None


def _split(whole: NamedSharding, slopes: tuple[NamedSharding, ...], _: None, slope: Any) -> Any:
    return (reduce(_constrain, slopes, slope),)


_gathered.defvjp(_gather, _split)


def divides(x: Array, mesh: Mesh) -> bool:
    """Whether the mesh can split the batch and the sequence of `[batch, seq, ...]`."""
    return all(n % size == 0 for n, size, _ in _splits(x, mesh))


def _splits(x: Array, mesh: Mesh) -> list[tuple[int, int, Any]]:
    """Of batch and sequence: size, into how many parts, by which axes."""
    sizes = math.prod(mesh.shape[axis] for axis in BATCH), mesh.shape[SEQUENCE]
    return list(zip(x.shape, sizes, (BATCH, SEQUENCE), strict=False))


def _constrain(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return abstract(leaf, sharding, place_of(leaf))
    sharding = kind_of(leaf, sharding)
    if isinstance(leaf, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    return jax.device_put(leaf, sharding)


def _spec(
    path: str, shape: tuple[int, ...], dims: Dims, mesh: Mesh, rules: Mapping[str, tuple[str, ...]]
) -> PartitionSpec:
    stacked = len(shape) - len(dims)
    split = [() if name is None else tuple(axis for axis in rules[name] if mesh.shape[axis] > 1) for name in dims]
    _require_apart(path, dims, split)
    for name, size, axes in zip(dims, shape[stacked:], split, strict=True):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            axis = max(axes, key=lambda axis: mesh.shape[axis])
            problem = f"{' x '.join(axes)} = {parts} does not divide the dim {name}={size} of {path}"
            raise ConfigError(f"mesh.{axis}", mesh.shape[axis], problem)
    return PartitionSpec(*[None] * stacked, *(axes or None for axes in split))


def _require_apart(path: str, dims: Dims, split: Sequence[tuple[str, ...]]) -> None:
    used: dict[str, str | None] = {}
    for name, axes in zip(dims, split, strict=True):
        for axis in axes:
            if axis in used:
                raise ValueError(f"{path}: dims {used[axis]} and {name} are both split by mesh axis {axis}")
            used[axis] = name
