"""This project's checkpoint: a folder with `config.yaml` and an orbax checkpoint of the canonical tree.

One array a leaf and layer, whatever the segments, placement or mesh of the run that reads or writes it; written and
read piece by piece (`zoo.arrays`), so that no leaf has to fit into memory twice. A checkpoint of training has more
beside it (`recipes.checkpoints`).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zoo.arrays import Form, Writer, describe, description, open_arrays, read
from zoo.checks import ConfigError, from_fields
from zoo.folders import BESIDE, CONFIG, WEIGHTS, Folder, copy, files, short
from zoo.models import abstract
from zoo.paths import flat
from zoo.registry import FAMILIES, ModelConfig, family_of
from zoo.source import Layout, Source
from zoo.tensors import Spec

FORMAT = 1


class CheckpointSource:
    """The weights of a checkpoint. Raises ConfigError where files are missing, unreadable or of another format."""

    def __init__(self, folder: Folder):
        self._folder = folder
        self.config, self.layout = _model(folder)
        self._arrays = open_arrays(folder / WEIGHTS)
        specs = ((path, Spec(tuple(array.shape), array.dtype.numpy_dtype)) for path, array in self._arrays.items())
        self.specs: Mapping[str, Spec] = dict(specs)
        _compare(self.config, self.specs, folder)
        self.files: Mapping[str, Folder] = files(folder / BESIDE)
        self.notices: tuple[str, ...] = ()

    def read(self, path: str) -> np.ndarray:
        return self._read(path, slice(None))

    def rows(self, path: str) -> Iterator[np.ndarray]:
        step = self._arrays[path].chunk_layout.read_chunk.shape[0]
        for first in range(0, self.specs[path].shape[0], step):
            yield from self._read(path, slice(first, min(first + step, self.specs[path].shape[0])))

    def _read(self, path: str, part: slice) -> np.ndarray:
        return read(self._folder / WEIGHTS, path, self._arrays[path], part)


def write(folder: Folder, source: Source) -> None:
    """Writes the weights piece by piece; an array with a dim of experts is never in memory as a whole.

    `config.yaml` comes last: in an object store it says that the rest is there.
    """
    writer = Writer(folder / WEIGHTS)
    for path, spec in source.specs.items():
        form = Form.of(spec.shape, spec.dtype)
        writer.create(path, form)
        for first, piece in _pieces(source, path, spec, form.chunk[0]):
            writer.write(path, (slice(first, first + len(piece)),), piece)
    writer.commit()
    describe(folder / WEIGHTS, description({path: spec.dtype for path, spec in source.specs.items()}))
    for file in source.files.values():
        copy(file, folder / BESIDE)
    write_config(folder, source.config, source.layout)


def write_config(folder: Folder, config: ModelConfig, layout: Layout | None = None, **more: Any) -> None:
    """Writes `config.yaml`: the format, the model, how Hugging Face had it, and what else there is to say."""
    import yaml

    fields: dict[str, Any] = {"format": FORMAT, "family": family_of(config), "model": dataclasses.asdict(config)}
    if layout is not None:
        fields["huggingface"] = {**layout._asdict(), "copies": list(layout.copies)}
    (folder / CONFIG).write_text(yaml.safe_dump(fields | more, sort_keys=False))


def _pieces(source: Source, path: str, spec: Spec, step: int) -> Iterator[tuple[int, np.ndarray]]:
    """Where a piece of a leaf begins, and the piece: at most `step` rows."""
    if len(spec.shape) < 3:
        leaf = source.read(path)
        yield from ((first, leaf[first : first + step]) for first in range(0, len(leaf), step))
        return
    rows = source.rows(path)
    for first in range(0, spec.shape[0], step):
        yield first, np.stack([next(rows) for _ in range(min(step, spec.shape[0] - first))])


def read_config(folder: Folder) -> dict[str, Any]:
    """What `config.yaml` says. Raises ConfigError if it cannot be read or is of another format."""
    import yaml

    path = folder / CONFIG
    try:
        fields = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError("checkpoint", path, f"cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError("checkpoint", path, f"cannot be read: {short(error)}") from error
    found = fields.get("format") if isinstance(fields, dict) else None
    if found != FORMAT:
        raise ConfigError("checkpoint", path, f"has format {found}, this version reads format {FORMAT}")
    if str(fields.get("family")) not in FAMILIES:
        raise ConfigError("checkpoint", path, f"has no family {fields.get('family')}", allowed=FAMILIES)
    return fields


def model_config(folder: Folder, fields: Mapping[str, Any]) -> ModelConfig:
    """The model that the folder's `config.yaml` describes. Raises ConfigError if it describes none."""
    given = fields.get("model")
    try:
        return from_fields(FAMILIES[fields["family"]], given if isinstance(given, Mapping) else {}, "model")
    except ConfigError as error:
        raise ConfigError("checkpoint", folder / CONFIG, f"describes no model: {short(error)}") from error


def _model(folder: Folder) -> tuple[ModelConfig, Layout | None]:
    fields = read_config(folder)
    config, given = model_config(folder, fields), fields.get("huggingface")
    if not isinstance(given, dict):
        return config, None
    return config, Layout(bool(given.get("fused_experts")), tuple(given.get("copies") or ()))


def _compare(config: ModelConfig, specs: Mapping[str, Spec], folder: Folder) -> None:
    wanted = {path: tuple(leaf.shape) for path, leaf in flat(abstract(config)).items()}
    for path in [*wanted, *(path for path in specs if path not in wanted)]:  # in the model's order
        if path not in specs:
            raise ConfigError("checkpoint", folder, f"lacks {path}")
        if path not in wanted:
            raise ConfigError("checkpoint", folder, f"holds {path}, which the model of its {CONFIG} has not")
        if specs[path].shape != wanted[path]:
            problem = f"{path} has shape {list(specs[path].shape)}, the model needs {list(wanted[path])}"
            raise ConfigError("checkpoint", folder, problem)
