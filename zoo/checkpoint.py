"""This project's checkpoint: a folder with `config.yaml` and an orbax checkpoint of the canonical tree.

One array a leaf and layer, whatever the segments, placement or mesh of the run that reads or writes it.
"""

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.checks import ConfigError, from_fields
from zoo.models import abstract
from zoo.paths import flat
from zoo.registry import FAMILIES, ModelConfig
from zoo.source import Layout, Source
from zoo.tensors import Spec

CONFIG, WEIGHTS, BESIDE = "config.yaml", "weights", "huggingface"
FORMAT = 1
BATCH_BYTES = 256 * 2**20  # leaves are handed to orbax in batches of about that size


class CheckpointSource:
    """The weights of a checkpoint. Raises ConfigError where files are missing, unreadable or of another format."""

    def __init__(self, folder: Path):
        self._weights = (folder / WEIGHTS).absolute()
        self.config, self.layout = _read_config(folder / CONFIG)
        self.specs: Mapping[str, Spec] = dict(_specs(self._weights))
        _compare(self.config, self.specs, folder)
        beside = folder / BESIDE
        self.files: Mapping[str, Path] = (
            {file.name: file for file in sorted(beside.iterdir())} if beside.is_dir() else {}
        )
        self.notices: tuple[str, ...] = ()

    def leaves(self, paths: Iterable[str]) -> Iterator[np.ndarray]:
        for batch in _batches((path, self.specs[path]) for path in paths):
            found = self._load(dict(batch))
            yield from (found[path] for path, _ in batch)

    def _load(self, specs: Mapping[str, Spec]) -> dict[str, np.ndarray]:
        import orbax.checkpoint.experimental.v1 as ocp

        context = ocp.Context()
        context.pytree.loading.partial_load = True
        wanted = {path: np.empty(spec.shape, spec.dtype) for path, spec in specs.items()}
        try:
            with context:
                return _flat(ocp.load(str(self._weights), _nested(wanted)))
        except Exception as error:  # orbax and tensorstore raise many kinds
            problem = f"{next(iter(specs))} or a leaf after it cannot be read: {_first_line(error)}"
            raise ConfigError("checkpoint", self._weights, problem) from error


def write(folder: Path, source: Source) -> None:
    """Writes the weights leaf by leaf; at no time are more than a leaf, or small ones of `BATCH_BYTES`, in memory."""
    import orbax.checkpoint.experimental.v1 as ocp
    import yaml

    context, weights = ocp.Context(), str((folder / WEIGHTS).absolute())
    # Weights hardly shrink, and compressing takes a third copy of a leaf.
    context.array.saving.use_compression = False
    with context:
        leaves = source.leaves(source.specs)
        for batch in _batches(source.specs.items()):
            ocp.partial.save(weights, _nested({path: next(leaves) for path, _ in batch}))
        ocp.partial.finalize(weights)
    if source.files:
        (folder / BESIDE).mkdir()
    for name, file in source.files.items():
        shutil.copyfile(file, folder / BESIDE / name)
    family = next(name for name, kind in FAMILIES.items() if type(source.config) is kind)
    fields: dict[str, Any] = {"format": FORMAT, "family": family, "model": dataclasses.asdict(source.config)}
    if source.layout is not None:
        fields["huggingface"] = {**source.layout._asdict(), "copies": list(source.layout.copies)}
    (folder / CONFIG).write_text(yaml.safe_dump(fields, sort_keys=False))


def _batches(specs: Iterable[tuple[str, Spec]]) -> Iterator[list[tuple[str, Spec]]]:
    """Leaves in turn, as many as have `BATCH_BYTES` together, or one that has more."""
    batch: list[tuple[str, Spec]] = []
    size = 0
    for path, spec in specs:
        if batch and size + spec.num_bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((path, spec))
        size += spec.num_bytes
    if batch:
        yield batch


def _read_config(path: Path) -> tuple[ModelConfig, Layout | None]:
    import yaml

    try:
        fields = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError("checkpoint", path, f"cannot be read: {_first_line(error)}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else None
        raise ConfigError("checkpoint", path, f"has format {found}, this version reads format {FORMAT}")
    if fields.get("family") not in FAMILIES:
        raise ConfigError("checkpoint", path, f"has no family {fields.get('family')}", allowed=FAMILIES)
    config = from_fields(FAMILIES[fields["family"]], fields.get("model") or {}, "model")
    given = fields.get("huggingface")
    return config, Layout(given["fused_experts"], tuple(given["copies"])) if given else None


def _specs(weights: Path) -> Iterator[tuple[str, Spec]]:
    import orbax.checkpoint.experimental.v1 as ocp

    try:
        metadata: Any = ocp.metadata(str(weights)).metadata
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise ConfigError("checkpoint", weights, f"cannot be read: {_first_line(error)}") from error
    for path, leaf in _flat(metadata).items():
        yield path, Spec(tuple(leaf.shape), np.dtype(leaf.dtype))


def _compare(config: ModelConfig, specs: Mapping[str, Spec], folder: Path) -> None:
    wanted = {path: tuple(leaf.shape) for path, leaf in flat(abstract(config)).items()}
    for path in wanted.keys() | specs.keys():
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


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    return {path: leaf for name, node in tree.items() for path, leaf in _flat(node, f"{prefix}{name}.").items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
