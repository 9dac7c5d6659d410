"""A training state in pieces: each segment, and each array outside of the segments."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from recipes.placement.hosted import on_host
from recipes.placement.segments import is_run
from zoo.paths import flat, path_name

Piece = int | str  # a segment by its first layer, or an array by the path of its parameter


@dataclass(frozen=True)
class Pieces:
    """How parameters, and trees of their structure in an optimizer's state, are taken apart.

    `shared` are the paths of what an optimizer keeps once for all parameters, such as its count of steps: it belongs to
    every piece.
    """

    segments: tuple[int, ...]
    arrays: tuple[str, ...]
    shared: frozenset[str]

    def __iter__(self) -> Iterator[Piece]:
        return iter((*self.segments, *self.arrays))

    def own(self, tree: PyTree, piece: Piece) -> PyTree:
        """The tree with None for what is neither the piece's nor shared."""

        def wanted(path: str, node: Any) -> bool:
            if is_run(node):
                return node.first == piece
            return path in self.shared or self._owner(path) == piece

        return _select(tree, wanted)

    def is_shared(self, tree: PyTree) -> list[bool]:
        """For each array of an optimizer's state, in order, whether it is shared."""
        return [path in self.shared for path in flat(tree)]

    def _owner(self, path: str) -> str | None:
        """The parameter outside of segments whose path ends this one: `1.mu.embedding.weight` is of the embedding."""
        parts = path.split(".")
        return next((tail for i in range(len(parts)) if (tail := ".".join(parts[i:])) in self.arrays), None)


def pieces_of(optimizer: optax.GradientTransformation, params: PyTree) -> Pieces:
    """The pieces of parameters."""
    nodes = jax.tree.leaves_with_path(params, is_leaf=is_run)
    segments = tuple(sorted(node.first for _, node in nodes if is_run(node) and jax.tree.leaves(node)))
    arrays = tuple(path_name(path) for path, node in nodes if not is_run(node))
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        kept = jax.eval_shape(lambda: optimizer.init(jax.tree.map(lambda _: None, params)))
    return Pieces(segments, arrays, frozenset(flat(kept)))


def any_on_host(trees: PyTree) -> bool:
    """Whether an array of a tree is on the host."""
    return any(map(on_host, jax.tree.leaves(trees)))


def _select(tree: PyTree, wanted: Callable[[str, Any], bool]) -> PyTree:
    def choose(path: Any, node: Any) -> Any:
        return node if wanted(path_name(path), node) else jax.tree.map(lambda _: None, node)

    return jax.tree.map_with_path(choose, tree, is_leaf=is_run)
