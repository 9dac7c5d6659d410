"""This project's checkpoint: a folder with `config.yaml` and an orbax checkpoint of the canonical tree.

One array a leaf and layer, whatever the segments, placement or mesh of the run that reads or writes it. Orbax makes the
tree and reads it like any other; its arrays are those of tensorstore (zarr3 in OCDBT), which are written and read here
piece by piece, so that no leaf has to fit into memory twice, each with a checksum.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.checks import ConfigError, from_fields
from zoo.models import abstract
from zoo.paths import flat
from zoo.registry import FAMILIES, ModelConfig, family_of
from zoo.source import Layout, Source
from zoo.tensors import Spec

CONFIG, WEIGHTS, BESIDE = "config.yaml", "weights", "huggingface"
FORMAT = 1
CHUNK_BYTES = 64 * 2**20  # of an array's pieces, and of what is written at a time
ARRAY = "/zarr.json"


class CheckpointSource:
    """The weights of a checkpoint. Raises ConfigError where files are missing, unreadable or of another format."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.config, self.layout = _read_config(folder / CONFIG)
        self._arrays = _open_arrays(folder / WEIGHTS)
        specs = ((path, Spec(tuple(array.shape), array.dtype.numpy_dtype)) for path, array in self._arrays.items())
        self.specs: Mapping[str, Spec] = dict(specs)
        _compare(self.config, self.specs, folder)
        self.files: Mapping[str, Path] = {file.name: file for file in sorted((folder / BESIDE).glob("*"))}
        self.notices: tuple[str, ...] = ()

    def read(self, path: str) -> np.ndarray:
        return self._read(path, slice(None))

    def rows(self, path: str) -> Iterator[np.ndarray]:
        step = self._arrays[path].chunk_layout.read_chunk.shape[0]
        for first in range(0, self.specs[path].shape[0], step):
            yield from self._read(path, slice(first, min(first + step, self.specs[path].shape[0])))

    def _read(self, path: str, part: slice) -> np.ndarray:
        try:
            return self._arrays[path][part].read().result()
        except ValueError as error:  # tensorstore's checks of integrity
            raise ConfigError(
                "checkpoint", self._folder / WEIGHTS, f"{path} cannot be read: {_short(error)}"
            ) from error


def write(folder: Path, source: Source) -> None:
    """Writes the weights piece by piece; an array with a dim of experts is never in memory as a whole."""
    import orbax.checkpoint.experimental.v1 as ocp
    import yaml

    weights = folder.absolute() / WEIGHTS
    ocp.save(str(weights), _nested({path: np.zeros(1, spec.dtype) for path, spec in source.specs.items()}))
    _Writer(weights).write(source)
    if source.files:
        (folder / BESIDE).mkdir()
    for name, file in source.files.items():
        shutil.copyfile(file, folder / BESIDE / name)
    family = family_of(source.config)
    fields: dict[str, Any] = {"format": FORMAT, "family": family, "model": dataclasses.asdict(source.config)}
    if source.layout is not None:
        fields["huggingface"] = {**source.layout._asdict(), "copies": list(source.layout.copies)}
    (folder / CONFIG).write_text(yaml.safe_dump(fields, sort_keys=False))


class _Writer:
    """Puts arrays in the place of those that orbax made, in transactions of about `CHUNK_BYTES`."""

    def __init__(self, weights: Path):
        import tensorstore

        self._tensorstore: Any = tensorstore
        self._base, self._context = _base(weights), tensorstore.Context()
        self._transaction = tensorstore.Transaction()
        self._pending_bytes = 0

    def write(self, source: Source) -> None:
        for path, spec in source.specs.items():
            step = max(1, CHUNK_BYTES * spec.shape[0] // max(1, spec.num_bytes))
            array = self._create(path, spec, min(step, spec.shape[0]))
            for first, piece in _pieces(source, path, spec, step):
                array[first : first + len(piece)].write(piece).result()
                self._pending_bytes += piece.nbytes
                if self._pending_bytes >= CHUNK_BYTES:
                    array = self._commit(path)
        self._transaction.commit_sync()

    def _commit(self, path: str) -> Any:
        self._transaction.commit_sync()
        self._transaction, self._pending_bytes = self._tensorstore.Transaction(), 0
        return self._tensorstore.open(
            _spec(self._base, path), transaction=self._transaction, context=self._context
        ).result()

    def _create(self, path: str, spec: Spec, step: int) -> Any:
        metadata = {
            "shape": list(spec.shape),
            "data_type": str(spec.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [step, *spec.shape[1:]]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        }
        how = {"create": True, "delete_existing": True, "store_data_equal_to_fill_value": True}
        made = {**_spec(self._base, path), "metadata": metadata, **how}
        return self._tensorstore.open(made, transaction=self._transaction, context=self._context).result()


def _pieces(source: Source, path: str, spec: Spec, step: int) -> Iterator[tuple[int, np.ndarray]]:
    """Where a piece of a leaf begins, and the piece: at most `step` rows."""
    if len(spec.shape) < 3:
        leaf = source.read(path)
        yield from ((first, leaf[first : first + step]) for first in range(0, len(leaf), step))
        return
    rows = source.rows(path)
    for first in range(0, spec.shape[0], step):
        yield first, np.stack([next(rows) for _ in range(min(step, spec.shape[0] - first))])


def _base(weights: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{weights.absolute()}/state/"}}


def _spec(base: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {**base, "path": f"{path}/"}}


def _open_arrays(weights: Path) -> dict[str, Any]:
    """The arrays by path, not read yet."""
    import tensorstore

    base, context = _base(weights), tensorstore.Context()
    try:
        keys = [key.decode() for key in tensorstore.KvStore.open(base, context=context).result().list().result()]
        paths = [key.removesuffix(ARRAY) for key in keys if key.endswith(ARRAY)]
        opened = [tensorstore.open(_spec(base, path), read=True, context=context) for path in paths]
        return {path: array.result() for path, array in zip(paths, opened, strict=True)}
    except ValueError as error:
        raise ConfigError("checkpoint", weights, f"cannot be read: {_short(error)}") from error


def _read_config(path: Path) -> tuple[ModelConfig, Layout | None]:
    import yaml

    try:
        fields = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError("checkpoint", path, f"cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError("checkpoint", path, f"cannot be read: {_short(error)}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else None
        raise ConfigError("checkpoint", path, f"has format {found}, this version reads format {FORMAT}")
    if fields.get("family") not in FAMILIES:
        raise ConfigError("checkpoint", path, f"has no family {fields.get('family')}", allowed=FAMILIES)
    config = from_fields(FAMILIES[fields["family"]], fields.get("model") or {}, "model")
    given = fields.get("huggingface")
    if not isinstance(given, dict):
        return config, None
    return config, Layout(bool(given.get("fused_experts")), tuple(given.get("copies") or ()))


def _compare(config: ModelConfig, specs: Mapping[str, Spec], folder: Path) -> None:
    wanted = {path: tuple(leaf.shape) for path, leaf in flat(abstract(config)).items()}
    for path in [*wanted, *(path for path in specs if path not in wanted)]:  # in the model's order
        if path not in specs:
            raise ConfigError("checkpoint", folder, f"lacks {path}")
        if path not in wanted:
            raise ConfigError("checkpoint", folder, f"holds {path}, which the model of its {CONFIG} has not")
        if specs[path].shape != wanted[path]:
            problem = f"{path} has shape {list(specs[path].shape)}, the model needs {list(wanted[path])}"
            raise ConfigError("checkpoint", folder, problem)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _short(error: BaseException) -> str:
    """The first line, without tensorstore's list of settings."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(" [")[0]
