"""Which array of a checkpoint is which part of a state: canonical paths, one array a leaf and layer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from recipes.checkpoints.folder import TRAINING
from recipes.placement.segments import unplace
from recipes.step.state import TrainState
from zoo.checkpoint import WEIGHTS
from zoo.paths import flat

_PARAMS, _MASTER = "params.", "master."


class Spot(NamedTuple):
    """Where an array of a checkpoint is in a state: in its leaf of that number, a whole or the row of a stack."""

    leaf: int
    row: int | None


class Stored(NamedTuple):
    """The arrays of a checkpoint by folder and path.

    `spots`: where each stands in the state: parameters only once, as masters where these are the wider ones.
    `narrow`: parameters that are the cast of a master, which holds what is stored.
    """

    spots: Mapping[tuple[str, str], Spot]
    narrow: Mapping[Spot, tuple[str, str]]


def stored(state: TrainState) -> Stored:
    """What a checkpoint of a state, placed or not, abstract or not, holds."""
    places = _canonical(state)
    spots, narrow = {}, {}
    for path, spot in places.items():
        name = (WEIGHTS, path.removeprefix(_PARAMS).removeprefix(_MASTER))
        if path.startswith(_PARAMS) and _MASTER + name[1] in places:
            narrow[spot] = name
        elif path.startswith((_PARAMS, _MASTER)):
            spots[name] = spot
        else:
            spots[TRAINING, path] = spot
    return Stored(spots, narrow)


def _canonical(state: PyTree) -> dict[str, Spot]:
    """The path that each leaf, or row of a stack of layers, has in the canonical tree."""
    leaves, structure = jax.tree.flatten(state)
    found = flat(unplace(jax.tree.unflatten(structure, [_label(number, leaf) for number, leaf in enumerate(leaves)])))
    return {path: Spot(int(label.flat[0]), int(label[1]) if label.ndim == 1 else None) for path, label in found.items()}


def _label(number: int, leaf: Any) -> np.ndarray:
    """`[[number, 0], [number, 1], ...]` with as many rows as the leaf has: what is unstacked says which row it was."""
    rows = leaf.shape[0] if leaf.ndim else 1
    return np.stack([np.full(rows, number), np.arange(rows)], axis=1)


def is_key(leaf: Any) -> bool:
    """Whether an array is one of random keys, which are stored as the integers that they are made of."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def wrap(leaf: Any, data: jax.Array) -> jax.Array:
    """Random keys like `leaf` out of their integers."""
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(data, impl=kinds[0])
