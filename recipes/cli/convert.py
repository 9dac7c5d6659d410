"""`zoo-import` and `zoo-export`: Hugging Face folders to checkpoints and back."""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from recipes import schema
from recipes.cli.launch import launch
from recipes.cli.runtime import prepare_jax, require_extra
from recipes.config import ExportConfig, ImportConfig

INTERVAL_S = 10.0


def import_main() -> None:
    """Entry point of `zoo-import`."""
    launch("zoo-import", import_folder, "import")


def export_main() -> None:
    """Entry point of `zoo-export`."""
    launch("zoo-export", export_folder, "export")


def import_folder(tree: DictConfig) -> int:
    """Writes a checkpoint; raises ConfigError, with nothing written, where the folder does not fit."""
    config: ImportConfig = schema.read_command(tree, ImportConfig)
    _prepare("zoo-import")
    from zoo import checkpoint
    from zoo.huggingface import HuggingFaceSource

    return _convert(HuggingFaceSource(Path(config.hf)), checkpoint.write, config.out)


def export_folder(tree: DictConfig) -> int:
    """Writes a Hugging Face folder; raises ConfigError, with nothing written, where the checkpoint does not fit."""
    config: ExportConfig = schema.read_command(tree, ExportConfig)
    _prepare("zoo-export")
    from zoo import huggingface
    from zoo.checkpoint import CheckpointSource

    return _convert(CheckpointSource(Path(config.checkpoint)), huggingface.write, config.out)


def _prepare(command: str) -> None:
    require_extra(command, "hf", "orbax", "safetensors")
    prepare_jax(None)


def _convert(source: Any, write: Any, out: str) -> int:
    from zoo.convert import convert

    start = time.perf_counter()
    watched: Any = Watched(source)
    for notice in source.notices:
        print(notice)
    convert(watched, write, out)
    size = sum(spec.num_bytes for spec in source.specs.values())
    parameters = sum(math.prod(spec.shape) for spec in source.specs.values())
    dtypes = ", ".join(sorted({str(spec.dtype) for spec in source.specs.values()}))
    seconds = time.perf_counter() - start
    print(f"{parameters:,} parameters, {size / 1e9:.2f} GB of {dtypes}, in {seconds:.1f} s\nwritten to {out}")
    return 0


class Watched:
    """Weights that say how far their reading is, every ten seconds."""

    def __init__(self, source: Any):
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def leaves(self, paths: Iterable[str]) -> Iterator[np.ndarray]:
        """As those of the source."""
        total = sum(spec.num_bytes for spec in self._source.specs.values())
        done, said = 0, time.monotonic()
        for leaf in self._source.leaves(paths):
            yield leaf
            done += leaf.nbytes
            if time.monotonic() - said > INTERVAL_S:
                said = time.monotonic()
                print(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB", flush=True)


if __name__ == "__main__":
    {"import": import_main, "export": export_main}[sys.argv.pop(1)]()
