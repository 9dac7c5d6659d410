"""Changing a tree of modules by the kind of its nodes."""

import copy
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree


def map_nodes(change: Callable[[Any], Any], tree: PyTree, kind: type | tuple[type, ...]) -> PyTree:
    """The tree with `change(node)` in the place of every node of a kind; what is inside such a node is not visited."""

    def is_kind(node: object) -> bool:
        return isinstance(node, kind)

    return jax.tree.map(lambda node: change(node) if is_kind(node) else node, tree, is_leaf=is_kind)


def replaced(node: Any, **fields: Any) -> Any:
    """The module with other values of some fields; unlike `dataclasses.replace`, without constructing it anew."""
    changed = copy.copy(node)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed
