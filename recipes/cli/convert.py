"""`zoo-import` and `zoo-export`: Hugging Face folders to checkpoints and back."""

import math
import sys
import time
from pathlib import Path
from typing import Any

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

    return _convert(HuggingFaceSource(Path(config.hf).expanduser()), checkpoint.write, config.out)


def export_folder(tree: DictConfig) -> int:
    """Writes a Hugging Face folder; raises ConfigError, with nothing written, where the checkpoint does not fit."""
    config: ExportConfig = schema.read_command(tree, ExportConfig)
    _prepare("zoo-export")
    from zoo import huggingface
    from zoo.checkpoint import CheckpointSource
    from zoo.folders import at

    return _convert(CheckpointSource(at(config.checkpoint, "checkpoint")), huggingface.write, config.out)


def _prepare(command: str) -> None:
    require_extra(command, "hf", "orbax", "tensorstore", "safetensors")
    prepare_jax(None)


def _convert(source: Any, write: Any, out: str) -> int:
    from zoo.convert import convert
    from zoo.source import Watched

    start = said = time.monotonic()
    size = sum(spec.num_bytes for spec in source.specs.values())

    def report(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > INTERVAL_S:
            said = time.monotonic()
            print(f"{done / 1e9:.1f} of {size / 1e9:.1f} GB", flush=True)

    for notice in source.notices:
        print(notice)
    convert(Watched(source, report), write, out)
    parameters = sum(math.prod(spec.shape) for spec in source.specs.values())
    dtypes = ", ".join(sorted({str(spec.dtype) for spec in source.specs.values()}))
    seconds = time.monotonic() - start
    print(f"{parameters:,} parameters, {size / 1e9:.2f} GB of {dtypes}, in {seconds:.1f} s\nwritten to {out}")
    return 0


if __name__ == "__main__":
    {"import": import_main, "export": export_main}[sys.argv.pop(1)]()
