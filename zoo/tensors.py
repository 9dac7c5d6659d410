"""Folders of safetensors files: read tensor by tensor, and written so. Nothing but numbers is ever read from them."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zoo.checks import ConfigError
from zoo.folders import Folder

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 * 10**9
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
FLOAT8 = "F8_E4M3"
SCALE = "_scale_inv"


class Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Quantization(NamedTuple):
    """Weights in float8, one float32 scale a block of `block` rows and columns; `dtype` is what they become."""

    block: tuple[int, int]
    dtype: np.dtype


class _Entry(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class TensorFolder:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    `specs` holds shape and dtype by name; a name gives its tensor, read from disk at that moment. A float8 weight comes
    as $w_{ij}\\, s_{\\lfloor i / b \\rfloor \\lfloor j / b' \\rfloor}$ with the scales `<name>_scale_inv`, which are no
    tensors of their own (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

    Raises ConfigError for a missing, truncated or corrupt file, an index that disagrees with its shards or points
    outside the folder, and dtypes that no weight has.
    """

    def __init__(self, folder: Path, quantization: Quantization | None = None):
        self._entries: dict[str, _Entry] = {}
        self._quantization = quantization
        index = _read_index(folder)
        for file in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._add(folder / file)
        if index is not None:
            _compare(folder / INDEX, index, {name: entry.file.name for name, entry in self._entries.items()})
        quantized = {name for name, entry in self._entries.items() if entry.dtype == FLOAT8 and quantization}
        self._scales = {name + SCALE for name in quantized if name + SCALE in self._entries}
        self.specs = {name: self._spec(name) for name in self._entries if name not in self._scales}

    def _add(self, file: Path) -> None:
        for name, entry in _header(file).items():
            if name in self._entries:
                raise ConfigError("tensor", name, f"stands in {self._entries[name].file.name} and in {file.name}")
            self._entries[name] = entry

    def _spec(self, name: str) -> Spec:
        entry = self._entries[name]
        if name + SCALE in self._scales and self._quantization is not None:
            if len(entry.shape) != 2:
                raise ConfigError("tensor", name, f"has shape {list(entry.shape)}; blocks of float8 are of matrices")
            wanted = tuple(-(-n // block) for n, block in zip(entry.shape, self._quantization.block, strict=True))
            if self._entries[name + SCALE].shape != wanted:
                problem = f"has shape {self._entries[name + SCALE].shape}, the weight's blocks need {wanted}"
                raise ConfigError("tensor", name + SCALE, problem)
            return Spec(entry.shape, np.dtype(self._quantization.dtype))
        if entry.dtype not in DTYPES:
            problem = f"has dtype {entry.dtype} in {entry.file.name}"
            hint = f"float8 needs its scales {name}{SCALE} and a quantization_config" if "F8" in entry.dtype else ""
            raise ConfigError("tensor", name, problem, allowed=DTYPES, hint=hint)
        return Spec(entry.shape, np.dtype(DTYPES[entry.dtype]))

    def __getitem__(self, name: str) -> np.ndarray:
        if name + SCALE not in self._scales or self._quantization is None:
            return self._read(name)
        rows, columns = self._quantization.block
        weight = self._read(name).astype(np.float32)
        scales = self._read(name + SCALE).astype(np.float32)
        for i in range(scales.shape[0]):  # one row of blocks at a time: never a second array of the weight's size
            part = weight[i * rows : (i + 1) * rows]
            part *= np.repeat(scales[i], columns)[: part.shape[1]]
        return weight.astype(self._quantization.dtype)

    def _read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        dtype = ml_dtypes.float8_e4m3fn if entry.dtype == FLOAT8 else DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        return np.fromfile(entry.file, dtype, count, offset=entry.offset).reshape(entry.shape)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.exists():
        if not (folder / SINGLE).exists():
            raise ConfigError("folder", folder, f"holds neither {SINGLE} nor {INDEX}; no other format is read")
        return None
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ConfigError("index", path, "has no weight_map from tensor names to files")
    for file in index.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError("index", path, f"names {file!r}, which is no safetensors file of this folder")
    return index


def _compare(path: Path, index: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name in index:
        if found.get(name) != index[name]:
            raise ConfigError("index", path, f"says that {index[name]} holds {name}, which it does not")
    for name in found:
        if name not in index:
            raise ConfigError("index", path, f"does not name {name}, which {found[name]} holds")


def _header(file: Path) -> dict[str, _Entry]:
    """Where each tensor of a file lies; the library checks the file first."""
    import safetensors

    if not file.exists():
        raise ConfigError("file", file, "is missing")
    try:
        with safetensors.safe_open(file, "numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise ConfigError("file", file, f"is no whole safetensors file: {error}") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: _Entry(file, item["dtype"], tuple(item["shape"]), 8 + length + item["data_offsets"][0])
        for name, item in header.items()
    }


def read_json(path: Folder) -> dict[str, Any]:
    """A JSON object. Raises ConfigError if the file holds none."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("file", path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("file", path, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("file", path, "holds no JSON object")
    return value


def write_tensors(folder: Path, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes the tensors in the order of `specs`, one at a time, into shards of at most `SHARD_BYTES`."""
    shards = list(_shards(specs))
    total = len(shards)
    names = [SINGLE] if total == 1 else [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
    stream = iter(tensors)
    for file, shard in zip(names, shards, strict=True):
        with (folder / file).open("wb") as out:
            out.write(_header_bytes(shard))
            for wanted, spec in shard.items():
                name, tensor = next(stream)
                assert (name, tensor.shape, tensor.dtype) == (wanted, *spec)
                np.ascontiguousarray(tensor).view(np.uint8).tofile(out)
    if total > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        size = sum(spec.num_bytes for spec in specs.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(specs: Mapping[str, Spec]) -> Iterator[dict[str, Spec]]:
    shard: dict[str, Spec] = {}
    size = 0
    for name, spec in specs.items():
        if shard and size + spec.num_bytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = spec
        size += spec.num_bytes
    yield shard


def _header_bytes(shard: Mapping[str, Spec]) -> bytes:
    """The format's header: its length as 8 bytes, then JSON padded with spaces to a multiple of 8."""
    codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in shard.items():
        start, end = end, end + spec.num_bytes
        header[name] = {"dtype": codes[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
