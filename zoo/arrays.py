"""Arrays on disk by path, those of tensorstore (zarr3 in OCDBT): read and written in parts, each with a checksum.

Orbax would write such arrays too, but without checksums: of 80 flipped bits in a checkpoint of its own it noticed none.
So it makes and reads what is around them, its description of the tree.
"""

import errno
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from zoo.checks import ConfigError
from zoo.folders import Folder, Remote, patience_s, short

CHUNK_BYTES = 64 * 2**20  # of an array's pieces, and of what is written at a time
# A store takes an object at tens of MB a second, but many at once: in one transaction, objects of so many bytes.
_REMOTE_BYTES, _OBJECT_BYTES = 512 * 2**20, 32 * 2**20
_STATE = "state"  # where orbax has the arrays
_ARRAY = "/zarr.json"
_WRITING = {"create": True, "store_data_equal_to_fill_value": True}


class Form(NamedTuple):
    """Of an array on disk: whole chunks of `chunk` are written and read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: Any, part: tuple[int, ...] | None = None) -> "Form":
        """In chunks of `part`, by default of the whole, or of as many of its rows as fit into `CHUNK_BYTES`."""
        dtype, part = np.dtype(dtype), tuple(shape if part is None else part)
        if not part:
            return cls((), dtype, ())
        row_bytes = dtype.itemsize * int(np.prod(part[1:], dtype=np.int64))
        rows = min(part[0], max(1, CHUNK_BYTES // max(1, row_bytes)))
        while part[0] % rows and part != tuple(shape):  # no chunk belongs to two parts
            rows -= 1
        return cls(tuple(shape), dtype, (max(1, rows), *(max(1, size) for size in part[1:])))


class Writer:
    """Writes arrays into a new folder, in transactions of about `CHUNK_BYTES`; what is not committed is not there.

    In an object store a transaction is larger, so that several objects are written at once. Raises OSError where
    they cannot be.

    Of several processes each has a Writer of its own `process`, and one of them calls `join` in the end.
    """

    def __init__(self, folder: Folder, process: int | None = None):
        import tensorstore

        self._tensorstore: Any = tensorstore
        self._folder = folder
        self._base, self._context = _base(folder, process), _context(folder)
        self._transaction, self._pending_bytes = tensorstore.Transaction(), 0
        self._most_bytes = _REMOTE_BYTES if isinstance(folder, Remote) else CHUNK_BYTES
        self._open: dict[str, Any] = {}
        self._writes: list[Any] = []

    def create(self, path: str, form: Form) -> None:
        """Makes an array, without values. `write` follows, of every part."""
        metadata = {
            "shape": list(form.shape),
            "data_type": str(form.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(form.chunk)}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        }
        self._open[path] = self._array({**_spec(self._base, path), "metadata": metadata, **_WRITING})

    def write(self, path: str, index: tuple[slice, ...], part: np.ndarray) -> None:
        """Writes a part of an array: whole chunks. Until it is committed the values must not change."""
        if path not in self._open:
            self._open[path] = self._array(_spec(self._base, path))
        self._writes.append(self._open[path][index].write(part, can_reference_source_data_indefinitely=True))
        self._pending_bytes += part.nbytes
        if self._pending_bytes >= self._most_bytes:
            self.commit()

    def commit(self) -> None:
        """Puts on disk what was written."""
        with _as_os_error(self._folder):
            for write in self._writes:
                write.result(patience_s(self._folder))
            self._transaction.commit_async().result(patience_s(self._folder))
        self._transaction, self._pending_bytes = self._tensorstore.Transaction(), 0
        self._open, self._writes = {}, []

    def _array(self, spec: Mapping[str, Any]) -> Any:
        with _as_os_error(self._folder):
            return self._tensorstore.open(spec, transaction=self._transaction, context=self._context).result(
                patience_s(self._folder)
            )


@contextmanager
def _as_os_error(folder: Folder) -> Iterator[None]:
    """What tensorstore cannot write, as the error of one line that a file's would be."""
    try:
        yield
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, "the store does not answer", str(folder)) from error
    except ValueError as error:
        raise OSError(errno.EIO, short(error), str(folder)) from error


def join(folder: Folder, processes: int) -> None:
    """The arrays that so many processes wrote parts of become one set: what each wrote is referred to, not copied."""
    import tensorstore

    context, transaction, patience = _context(folder), tensorstore.Transaction(), patience_s(folder)
    with _as_os_error(folder):
        whole = tensorstore.KvStore.open(_base(folder), context=context).result(patience)
        for process in range(processes):
            part = tensorstore.KvStore.open(_base(folder, process), context=context).result(patience)
            part.experimental_copy_range_to(whole.with_transaction(transaction)).result(patience)
        transaction.commit_async().result(patience)


def description(dtypes: Mapping[str, Any]) -> dict[str, bytes]:
    """The files, by their place in a folder of arrays, from which orbax knows the tree that these are."""
    import orbax.checkpoint as ocp

    me = jax.process_index()  # alone, whatever other processes there are
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix="alone")
    tree = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, multiprocessing_options=alone)
    options = ocp.CompositeOptions(multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, state=tree)
    leaves = ocp.args.PyTreeSave(_nested({path: np.zeros(1, dtype) for path, dtype in dtypes.items()}))
    with (
        tempfile.TemporaryDirectory() as scratch,
        ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer,
    ):
        made = Path(scratch) / "made"
        checkpointer.save(made, args=ocp.args.Composite(state=leaves))
        around = [file for file in made.iterdir() if file.is_file()]
        return {str(file.relative_to(made)): file.read_bytes() for file in [*around, made / _STATE / "_METADATA"]}


def describe(folder: Folder, files: Mapping[str, bytes]) -> None:
    """Puts a `description` beside the arrays."""
    for name, content in files.items():
        (folder / name).write_bytes(content)


def open_arrays(folder: Folder) -> dict[str, Any]:
    """The arrays by path, not read yet. Raises ConfigError if what says where they are is missing or damaged."""
    import tensorstore

    base, context, patience = _base(folder), _context(folder), patience_s(folder)
    try:
        stored = tensorstore.KvStore.open(base, context=context).result(patience)
        keys = [key.decode() for key in stored.list().result(patience)]
        paths = [key.removesuffix(_ARRAY) for key in keys if key.endswith(_ARRAY)]
        reading = {"read": True, "context": context}
        opened = [
            tensorstore.open({**_spec(base, path), "fill_missing_data_reads": False}, **reading) for path in paths
        ]
        return {path: array.result(patience) for path, array in zip(paths, opened, strict=True)}
    except (ValueError, OSError) as error:
        raise ConfigError("checkpoint", folder, f"cannot be read: {short(error)}") from error


def read(folder: Folder, path: str, array: Any, index: Any = ()) -> np.ndarray:
    """A part of an array of `open_arrays`. Raises ConfigError naming the leaf if it is missing or damaged."""
    try:
        return array[index].read().result(patience_s(folder))
    except (ValueError, OSError) as error:  # tensorstore's checks of integrity
        raise ConfigError("checkpoint", folder, f"{path} cannot be read: {short(error)}") from error


def _base(folder: Folder, process: int | None = None) -> dict[str, Any]:
    """Where the arrays are, or what one of several processes wrote of them; the names are orbax's."""
    inner = folder / _STATE if process is None else folder / _STATE / f"ocdbt.process_{process}"
    if isinstance(inner, Remote):
        return {"driver": "ocdbt", "base": inner.spec, "target_data_file_size": _OBJECT_BYTES}
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{inner.absolute()}/"}}


def _context(folder: Folder) -> Any:
    import tensorstore

    return folder.context if isinstance(folder, Remote) else tensorstore.Context()


def _spec(base: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {**base, "path": f"{path}/"}}


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree
