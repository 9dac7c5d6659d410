"""Two trees of arrays compared leaf by leaf and expert by expert: the worst difference, and where it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from layers.axes import logical_axes
from zoo.paths import path_name

EXPERT = "expert"


@dataclass(frozen=True)
class Leaf:
    """The largest difference in an array, relative to the largest magnitude of the expected one.

    - `experts`: the same for each routed expert by itself, empty for other arrays; `worst` is then the largest of them,
      so that one expert cannot hide behind another.
    - `where`: the index of the largest difference. `equal`: every bit is.
    - `worst` is infinite where something is not finite, or should be zero and is not.
    """

    name: str
    worst: float
    where: tuple[int, ...]
    equal: bool
    experts: tuple[float, ...] = ()

    @property
    def expert(self) -> int | None:
        """The expert that differs most."""
        return int(np.argmax(self.experts)) if self.experts else None


@dataclass(frozen=True)
class Comparison:
    """Every leaf, the worst first; with a tolerance of 0 every bit has to be equal."""

    leaves: tuple[Leaf, ...]
    tolerance: float

    @property
    def worst(self) -> float:
        return max((leaf.worst for leaf in self.leaves), default=0.0)

    @property
    def worst_leaf(self) -> str:
        """The name of the leaf that differs most, with the expert; empty if all are equal."""
        if not self.leaves or (self.leaves[0].equal and np.isfinite(self.worst)):
            return ""
        leaf = self.leaves[0]
        return leaf.name if leaf.expert is None else f"{leaf.name}, expert {leaf.expert}"

    @property
    def wrong(self) -> list[Leaf]:
        """The leaves that differ by more than the tolerance."""
        if self.tolerance == 0:
            return [leaf for leaf in self.leaves if not leaf.equal or not np.isfinite(leaf.worst)]
        return [leaf for leaf in self.leaves if not leaf.worst <= self.tolerance]

    @property
    def ok(self) -> bool:
        return bool(self.leaves) and not self.wrong


def compare(actual: PyTree, expected: PyTree, tolerance: float = 0.0) -> Comparison:
    """Compares trees whose leaves correspond one to one; routed experts are known by their logical axis.

    Raises ValueError for trees of other leaves or shapes.
    """
    leaves = sorted(_leaves(actual, expected), key=lambda leaf: (leaf.equal, -leaf.worst))
    return Comparison(tuple(leaves), tolerance)


def _leaves(actual: PyTree, expected: PyTree) -> Iterator[Leaf]:
    found, known = jax.tree.leaves(actual), jax.tree.leaves_with_path(expected)
    if len(found) != len(known):
        raise ValueError(f"Expected {len(known)} arrays, got {len(found)}")
    for a, (path, e), dims in zip(found, known, logical_axes(expected), strict=True):
        name, a, e = path_name(path) or "array", np.asarray(a), np.asarray(e)
        if a.shape != e.shape or a.dtype != e.dtype:
            raise ValueError(f"{name}: {a.dtype}{list(a.shape)} is not {e.dtype}{list(e.shape)}")
        yield _leaf(name, a, e, dims)


def _leaf(name: str, a: np.ndarray, e: np.ndarray, dims: Any) -> Leaf:
    equal = a.tobytes() == e.tobytes()
    a, e = a.astype(np.float64), e.astype(np.float64)
    off = np.abs(a - e)
    off = np.where(np.isfinite(off), off, np.inf)
    where = tuple(int(i) for i in np.unravel_index(np.argmax(off), off.shape)) if off.size else ()
    experts: tuple[float, ...] = ()
    if EXPERT in dims:
        axis = e.ndim - len(dims) + dims.index(EXPERT)
        experts = tuple(_relative(off.take(i, axis), e.take(i, axis)) for i in range(e.shape[axis]))
        worst = int(np.argmax(experts))
        within = off.take(worst, axis)
        inside = [int(i) for i in np.unravel_index(np.argmax(within), within.shape)]
        where = (*inside[:axis], worst, *inside[axis:])
    return Leaf(name, max(experts, default=_relative(off, e)), where, equal, experts)


def _relative(off: np.ndarray, expected: np.ndarray) -> float:
    largest, scale = np.max(off, initial=0.0), np.max(np.abs(expected), initial=0.0)
    if largest == 0:
        return 0.0
    return float(largest / scale) if scale and np.isfinite(largest) else float("inf")
