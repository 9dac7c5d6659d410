"""A stack of blocks, one module a layer."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree


class Stack(eqx.Module):
    """Blocks applied one after another: the canonical form, which people build and edit.

    Each block is called as `block(x, *args) -> (x, aux)`. Returns the last `x` and a tuple of what the layers report,
    each with a leading dim of layers (one here; a placed stack reports a run of layers at once).
    """

    blocks: tuple[Any, ...]

    def __call__(self, x: Float[Array, "batch seq dim"], *args: Any) -> tuple[Float[Array, "batch seq dim"], tuple]:
        reports = []
        for block in self.blocks:
            x, aux = block(x, *args)
            reports.append(jax.tree.map(lambda leaf: leaf[None], aux))
        return x, tuple(reports)


def build_stack(
    make_block: Callable[[Any, PRNGKeyArray], eqx.Module], kinds: Sequence[Any], *, key: PRNGKeyArray
) -> Stack:
    """A stack of `len(kinds)` blocks; layers of equal kind that follow one another are drawn in one `vmap`.

    The values of layer `i` depend on `fold_in(key, i)` alone. The cost of compiling follows the number of such runs.
    """
    blocks = []
    for kind, group in groupby(enumerate(kinds), key=lambda item: item[1]):
        layers = [layer for layer, _ in group]
        keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.array(layers))
        drawn = eqx.filter_vmap(lambda k, kind=kind: make_block(kind, k))(keys)
        blocks += unstack(drawn, len(layers))
    return Stack(tuple(blocks))


def unstack(stacked: PyTree, length: int) -> list[PyTree]:
    """The `length` trees whose leaves are the slices of a stacked one's along the first dim."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(length)]
