"""A training state in pieces: each segment by itself, and all the rest."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from recipes.placement.hosted import on_host
from recipes.placement.segments import Run
from zoo.paths import path_name


def is_run(node: object) -> bool:
    """Whether a node of a tree is a segment."""
    return isinstance(node, Run)


@dataclass(frozen=True)
class Pieces:
    """How a state is taken apart: `segments` by their first layers.

    `shared` are the paths of what an optimizer keeps once for all parameters, such as its count of steps: it belongs to
    every piece.
    """

    segments: tuple[int, ...]
    shared: frozenset[str]

    def rest(self, tree: PyTree) -> PyTree:
        """The tree with None for the arrays of segments."""
        return _select(tree, lambda _, node: not is_run(node))

    def own(self, tree: PyTree, first: int) -> PyTree:
        """The tree of an optimizer's state, or of parameters, with None for what is not that segment's or shared."""
        return _select(tree, lambda path, node: node.first == first if is_run(node) else path in self.shared)

    def is_shared(self, tree: PyTree) -> list[bool]:
        """For each array of an optimizer's state, in order, whether it is shared."""
        return [path_name(path) in self.shared for path, _ in jax.tree.leaves_with_path(tree)]


def pieces_of(optimizer: optax.GradientTransformation, params: PyTree) -> Pieces:
    """The pieces of parameters and of trees of their structure."""
    nodes = jax.tree.leaves(params, is_leaf=is_run)
    segments = {run.first for run in nodes if is_run(run) and jax.tree.leaves(run)}
    nothing = jax.tree.map(lambda _: None, params)
    kept = jax.eval_shape(lambda: optimizer.init(nothing))
    return Pieces(tuple(sorted(segments)), frozenset(path_name(path) for path, _ in jax.tree.leaves_with_path(kept)))


def any_on_host(trees: Iterable[PyTree] | PyTree) -> bool:
    """Whether an array of a tree is on the host."""
    return any(map(on_host, jax.tree.leaves(trees)))


def _select(tree: PyTree, wanted: Callable[[str, Any], bool]) -> PyTree:
    def choose(path: Any, node: Any) -> Any:
        return node if wanted(path_name(path), node) else jax.tree.map(lambda _: None, node)

    return jax.tree.map_with_path(choose, tree, is_leaf=is_run)
