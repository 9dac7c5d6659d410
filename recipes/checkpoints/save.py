"""Saving: the training thread copies the state to host memory, another writes it.

Orbax's own writer is not used for arrays: it leaves out checksums (`zoo.arrays`), and it would want each layer as an
array of its own, a second copy of the state on the device.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from recipes.checkpoints import folder as folders
from recipes.checkpoints.leaves import TRAINING, Spot, Stored, is_key, stored
from recipes.step.state import TrainState
from zoo.arrays import Form, Writer, describe, description, join
from zoo.checkpoint import WEIGHTS
from zoo.folders import Folder, short

BARRIER_S = 600  # how long a process waits for the others to have written theirs


class NotSaved(Exception):
    """A checkpoint could not be written; what was written of it is gone again."""


class HostLeaf(NamedTuple):
    """The parts of an array that this process writes, each with its place in the whole, and the shape of a part."""

    shape: tuple[int, ...]
    dtype: np.dtype
    part: tuple[int, ...]
    parts: list[tuple[tuple[slice, ...], np.ndarray]]


class Saver:
    """Saves states into a folder, one at a time, while training goes on.

    `finish(folder, step)` writes what else belongs to a checkpoint, `config.yaml` last. `save` and `wait` raise
    NotSaved for what failed since.
    """

    def __init__(self, root: Folder, keep_last: int, keep_every: int, finish: Callable[[Any, int], None]):
        self._root, self._finish = root, finish
        self._keep = {"keep_last": keep_last, "keep_every": keep_every}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._stored: Stored | None = None
        self._descriptions: dict[str, dict[str, bytes]] = {}
        self._saved: int | None = None

    def save(self, state: TrainState, step: int) -> Folder:
        """Copies the state and has it written; returns where it will be. Waits for the one before it to be written."""
        if self._saved == step:
            return self._root / str(step)
        self.wait()
        self._stored = self._stored or stored(state)
        self._pending = self._thread.submit(self._write, self._stored, snapshot(state), step)
        self._saved = step
        return self._root / str(step)

    def wait(self) -> None:
        """Until all is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, held: Stored, leaves: list[HostLeaf], step: int) -> None:
        process, processes = jax.process_index(), jax.process_count()
        partial = folders.unfinished(self._root, step)
        try:
            if process == 0:
                folders.begin(self._root, step)
            _meet(f"begun/{step}")
            for name in (WEIGHTS, TRAINING):
                spots = {path: spot for (folder, path), spot in held.spots.items() if folder == name}
                _write_arrays(Writer(partial / name, process if processes > 1 else None), spots, leaves)
            _meet(f"written/{step}")
            if process == 0:
                self._complete(held, leaves, step, processes)
            _meet(f"complete/{step}")
        except (OSError, ValueError) as error:
            if process == 0:
                folders.abandon(self._root, step)
            raise NotSaved(f"the checkpoint of step {step} cannot be written: {partial}: {_cause(error)}") from error

    def _complete(self, held: Stored, leaves: list[HostLeaf], step: int, processes: int) -> None:
        partial = folders.unfinished(self._root, step)
        for name in (WEIGHTS, TRAINING):
            if processes > 1:
                join(partial / name, processes)
            if name not in self._descriptions:
                spots = held.spots.items()
                dtypes = {path: leaves[spot.leaf].dtype for (folder, path), spot in spots if folder == name}
                self._descriptions[name] = description(dtypes)
            describe(partial / name, self._descriptions[name])
        self._finish(partial, step)
        folders.commit(self._root, step)
        folders.prune(self._root, **self._keep)


def snapshot(state: Any) -> list[HostLeaf]:
    """The leaves of a state in host memory, of each part one copy among all processes."""
    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(state)]
    own = [[shard for shard in leaf.addressable_shards if shard.replica_id == 0] for leaf in leaves]
    for shard in (shard for shards in own for shard in shards):
        shard.data.copy_to_host_async()
    # Into one piece of memory, which is given back as a whole: pieces of their own would leave holes.
    memory = np.empty(sum(_aligned(shard.data.nbytes) for shards in own for shard in shards), np.uint8)
    return [
        HostLeaf(
            leaf.shape,
            np.dtype(leaf.dtype),
            leaf.sharding.shard_shape(leaf.shape),
            [(shard.index, copy) for shard, copy in zip(shards, copies, strict=True)],
        )
        for leaf, shards, copies in zip(leaves, own, _copied(own, memory), strict=True)
    ]


def _aligned(num_bytes: int) -> int:
    """So that the next array begins where one of any dtype may."""
    return -(-num_bytes // 64) * 64


def _copied(own: list[list[Any]], memory: np.ndarray) -> Iterator[list[np.ndarray]]:
    """The values of each leaf's parts, copied: the step donates its state."""
    first = 0
    for shards in own:
        copies = []
        for shard in shards:
            data = np.asarray(shard.data)
            copy = memory[first : first + data.nbytes].view(data.dtype).reshape(data.shape)
            np.copyto(copy, data)
            first += _aligned(data.nbytes)
            copies.append(copy)
        yield copies


def _write_arrays(writer: Writer, spots: dict[str, Spot], leaves: list[HostLeaf]) -> None:
    for path, (number, row) in spots.items():
        leaf = leaves[number]
        skip = 0 if row is None else 1
        form = Form.of(leaf.shape[skip:], leaf.dtype, leaf.part[skip:])
        if leaf.parts:
            writer.create(path, form)
        for index, part in leaf.parts:
            for place, piece in _pieces(index[skip:], part if row is None else part[row], form):
                writer.write(path, place, piece)
    writer.commit()


def _pieces(index: tuple[slice, ...], part: np.ndarray, form: Form) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """A part in as many rows at a time as a chunk has."""
    if not index:
        yield (), part
        return
    first = index[0].start or 0
    for at in range(0, len(part), form.chunk[0]):
        piece = part[at : at + form.chunk[0]]
        yield (slice(first + at, first + at + len(piece)), *index[1:]), piece


def _meet(name: str) -> None:
    """Waits for the other processes, without their devices, which go on training."""
    if jax.process_count() > 1:
        from orbax.checkpoint.multihost import get_barrier_sync_fn

        get_barrier_sync_fn()(key=f"checkpoint/{name}", timeout_ms=BARRIER_S * 1000)


def _cause(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or short(error)
