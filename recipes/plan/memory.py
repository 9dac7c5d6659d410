"""A device's memory by what it holds: the state exactly, the rest by the buffers that are alive at the peak."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jaxtyping import PyTree

from recipes.placement.hosted import place_of
from recipes.plan.buffers import Buffer, Peak
from recipes.step.state import TrainState

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "pred": "bool"}
_DTYPES |= {
    f"{sign}{bits}": f"{word}{bits}" for sign, word in (("s", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
}
_COPIES = ("slice", "copy", "custom-call", "fusion-start")


@dataclass(frozen=True)
class Kept:
    """An activation that a segment of layers saves: one array a layer, in a stack of `length`.

    `elements`: how many a device may hold of one layer's array, by how the compiler splits it.
    """

    tag: str
    layers: str
    length: int
    place: str
    elements: frozenset[int]
    dtype: str


@dataclass(frozen=True)
class Known:
    """What is known of a step's arrays, to tell its buffers by: local dims, sorted, stacked or of a layer at work."""

    kept: tuple[Kept, ...] = ()
    params: frozenset[tuple[int, ...]] = frozenset()
    gathered: frozenset[tuple[int, ...]] = frozenset()

    def without(self, host_parts: Iterable[str]) -> "Known":
        """The same, of which nothing that is on the host is looked for on the device."""
        there = set(host_parts)
        kept = tuple(each for each in self.kept if each.place == "host" or activation(each) not in there)
        return replace(self, kept=kept)


@dataclass
class Split:
    """Bytes by part, which add up to the compiler's own total; `unexplained` is among them."""

    total_bytes: int
    parts: Counter = field(default_factory=Counter)

    def finished(self) -> dict[str, int]:
        """The parts, the largest first, and last what is missing to the total."""
        parts = {name: size for name, size in self.parts.most_common() if size and name != "unexplained"}
        return parts | {"unexplained": self.total_bytes - sum(parts.values())}


def tree_bytes(tree: PyTree, place: str) -> int:
    """Bytes of an abstract tree on one device, or on its host."""
    return sum(local_bytes(leaf) for leaf in jax.tree.leaves(tree) if place_of(leaf) == place)


def state_bytes(state: TrainState, place: str) -> dict[str, int]:
    """Bytes of an abstract state on one device, or on its host, by part."""
    trees = {"parameters": state.params, "masters": state.master, "moments": state.opt_state}
    return {part: tree_bytes(tree, place) for part, tree in trees.items()}


def local_bytes(leaf: Any) -> int:
    """Bytes of the part of an abstract array that one device holds."""
    return math.prod(local_shape(leaf)) * leaf.dtype.itemsize


def local_shape(leaf: Any) -> tuple[int, ...]:
    """The part of an abstract array that one device holds."""
    sharding = getattr(leaf, "sharding", None)
    return tuple(leaf.shape) if sharding is None else tuple(sharding.shard_shape(leaf.shape))


def split_device(total_bytes: int, arguments: dict[str, int], peak: Peak | None, known: Known) -> dict[str, int]:
    """Parts of the device's peak; `arguments` are the parts of the state and the batch, which are known exactly."""
    split = Split(total_bytes, Counter(arguments))
    if peak is not None:
        waiting = [kept for kept in known.kept if kept.place == "device"]
        for buffer in peak.buffers:
            split.parts[_part(buffer, waiting, known)] += buffer.size_bytes
    return split.finished()


def split_host(total_bytes: int, arguments: dict[str, int], peak: Peak | None, known: Known) -> dict[str, int]:
    """Parts of what a device keeps on the host."""
    split = Split(total_bytes, Counter(arguments))
    waiting = [kept for kept in known.kept if kept.place == "host"]
    for buffer in peak.buffers if peak is not None else ():
        kept = _claim(buffer, waiting)
        if kept is not None:
            split.parts[activation(kept)] += buffer.size_bytes
        elif dims_of(buffer.dims) in known.params:
            split.parts["gradients"] += buffer.size_bytes
    return split.finished()


def activation(kept: Kept) -> str:
    """The name of an activation's part."""
    return f"activations/{kept.tag}/{kept.layers}"


def _part(buffer: Buffer, waiting: list[Kept], known: Known) -> str:
    """What a buffer of temporaries is, by its dims and by the scope that made it."""
    forward = "jvp(" in buffer.scope and "transpose(" not in buffer.scope
    kept = _claim(buffer, waiting)
    if kept is not None:
        return activation(kept)
    dims = dims_of(buffer.dims)
    if dims in known.params and len(buffer.dims) > 1:
        return "copies of parameters" if forward and not _summed(buffer) else "gradients"
    if dims in known.gathered and len(dims) > 1:
        return "gradients of a layer" if buffer.dtype == "f32" else "gathered parameters"
    if buffer.name.startswith(("all-gather", "all-reduce", "reduce-scatter")):
        return "collectives"
    moved = any(_is_layer_of(buffer, kept) for kept in known.kept if kept.place == "host")
    if moved and (_copies(buffer) or not buffer.scope):
        return "on the way to and from the host"
    if _is_stack(buffer, known.kept) and forward:
        return "activations/untagged"
    if "shard_map" in buffer.scope:
        return "dispatch and experts at work"
    if "rematted_computation" in buffer.scope:
        return "recomputed in the layer at work"
    return "temporaries" if buffer.scope else "unexplained"


def _claim(buffer: Buffer, waiting: list[Kept]) -> Kept | None:
    """The saved activation that a buffer is, which is then taken."""
    for kept in waiting:
        stacks = {kept.length * elements for elements in kept.elements}
        first = buffer.dims[:1] == (kept.length,)
        if first and math.prod(buffer.dims) in stacks and _DTYPES.get(buffer.dtype) == kept.dtype:
            waiting.remove(kept)
            return kept
    return None


def _is_layer_of(buffer: Buffer, kept: Kept) -> bool:
    return math.prod(buffer.dims) in kept.elements and _DTYPES.get(buffer.dtype) == kept.dtype


def _is_stack(buffer: Buffer, kept: Sequence[Kept]) -> bool:
    return bool(buffer.dims) and buffer.dims[0] in {each.length for each in kept}


def _copies(buffer: Buffer) -> bool:
    return any(word in buffer.name for word in _COPIES) or buffer.scope.endswith("dynamic_slice")


def _summed(buffer: Buffer) -> bool:
    """The loss makes the head's gradient in the forward pass, in float32."""
    return buffer.dtype == "f32"


def dims_of(dims: Iterable[int]) -> tuple[int, ...]:
    """Dims in any order, without those of one: what a change of layout keeps."""
    return tuple(sorted(n for n in dims if n != 1))
