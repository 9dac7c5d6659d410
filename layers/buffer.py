"""Arrays of a model that are state rather than parameters."""

import equinox as eqx
import jax
from jaxtyping import Array, PyTree


class Buffer(eqx.Module):
    """An array that no gradient, optimizer, weight decay or cast touches, such as a router's selection bias."""

    value: Array


def split_buffers(tree: PyTree) -> tuple[PyTree, PyTree]:
    """`(parameters, buffers)`, each of the tree's structure with None for the arrays of the other (`eqx.combine`)."""

    def is_buffer(node: object) -> bool:
        return isinstance(node, Buffer)

    return eqx.partition(tree, jax.tree.map(lambda node: not is_buffer(node), tree, is_leaf=is_buffer))
