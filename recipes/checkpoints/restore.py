"""Restoring: the arrays of a checkpoint, read leaf by leaf into the state that a run wants, wherever its parts live."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import batched
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from recipes.checkpoints.leaves import TRAINING, Spot, is_key, stored, wrap
from recipes.placement.hosted import kind_of
from recipes.step.state import TrainState
from zoo.arrays import open_arrays, read
from zoo.checkpoint import WEIGHTS
from zoo.checks import ConfigError
from zoo.folders import Folder, Remote

Name = tuple[str, str]  # folder and path of an array
_FROM_A_STORE = 8  # layers that are read at once: each comes at tens of MB a second


def restore(folder: Folder, wanted: TrainState, *, allow_cast: bool = False) -> TrainState:
    """The state of a checkpoint in the structure, shardings and memories of the abstract state `wanted`.

    Read one leaf at a time, of each the parts of this process's devices. Raises ConfigError naming folder and leaf
    where one is missing, superfluous, damaged, of another shape or, unless `allow_cast`, of another dtype.
    """
    held, (leaves, structure) = stored(wanted), jax.tree.flatten(wanted)
    arrays = {(name, path): array for name in (WEIGHTS, TRAINING) for path, array in open_arrays(folder / name).items()}
    _compare(folder, held.spots, leaves, arrays, allow_cast)
    rows: dict[int, dict[int | None, Name]] = {}
    for name, spot in [*held.spots.items(), *((name, spot) for spot, name in held.narrow.items())]:
        rows.setdefault(spot.leaf, {})[spot.row] = name
    return jax.tree.unflatten(
        structure, [_leaf(folder, leaf, rows[number], arrays) for number, leaf in enumerate(leaves)]
    )


def _compare(
    folder: Folder, spots: Mapping[Name, Spot], leaves: list[Any], arrays: Mapping[Name, Any], allow_cast: bool
) -> None:
    anew = "train.init_from=FOLDER begins with its weights alone"
    for name in [*spots, *(name for name in arrays if name not in spots)]:
        where, path = folder / name[0], name[1]
        if name not in arrays:
            raise ConfigError("checkpoint", where, f"lacks {path}, which this run needs", hint=anew)
        if name not in spots:
            raise ConfigError("checkpoint", where, f"holds {path}, which this run has not", hint=anew)
        leaf, found = _plain(leaves[spots[name].leaf]), arrays[name]
        shape = leaf.shape if spots[name].row is None else leaf.shape[1:]
        if tuple(found.shape) != shape:
            problem = f"{path} has shape {list(found.shape)}, this run needs {list(shape)}"
            raise ConfigError("checkpoint", where, problem, hint=anew)
        if found.dtype.numpy_dtype != leaf.dtype and not allow_cast:
            problem = f"{path} is of {found.dtype.numpy_dtype}, this run needs {leaf.dtype}"
            raise ConfigError("checkpoint", where, problem, hint="train.allow_cast=true converts it")


def _leaf(folder: Folder, leaf: Any, rows: Mapping[int | None, Name], arrays: Mapping[Name, Any]) -> jax.Array:
    """One leaf, whole or the rows of a stack."""
    plain = _plain(leaf)

    @lru_cache(maxsize=1)  # devices that hold the same part follow one another
    def part(index: tuple[slice, ...]) -> np.ndarray:
        def fetch(name: Name, inner: tuple[slice, ...]) -> np.ndarray:
            return read(folder / name[0], name[1], arrays[name], inner)

        if None in rows:
            return fetch(rows[None], index).astype(plain.dtype, copy=False)
        layers = range(*index[0].indices(plain.shape[0]))
        sizes = [len(range(*each.indices(size))) for each, size in zip(index[1:], plain.shape[1:], strict=True)]
        stack = np.empty((len(layers), *sizes), plain.dtype)
        at_once = _FROM_A_STORE if isinstance(folder, Remote) else 1
        with ThreadPoolExecutor(at_once) as readers:
            for some in batched(range(len(layers)), at_once):
                found = readers.map(lambda place: fetch(rows[layers[place]], index[1:]), some)
                for place, row in zip(some, found, strict=True):
                    stack[place] = row.astype(plain.dtype, copy=False)
        return stack

    sharding = kind_of(plain, plain.sharding or SingleDeviceSharding(jax.devices()[0]))
    array = jax.make_array_from_callback(plain.shape, sharding, part, dtype=plain.dtype)
    jax.block_until_ready(array)  # before the next leaf is read: transfers under way hold what they copy from
    return wrap(leaf, array) if is_key(leaf) else array


def _plain(leaf: Any) -> Any:
    """The leaf as it is stored."""
    return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
