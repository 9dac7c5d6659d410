"""Models out of folders and into them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from zoo import checkpoint, huggingface
from zoo.base import Decoder
from zoo.checkpoint import CheckpointSource
from zoo.checks import ConfigError
from zoo.huggingface import HuggingFaceSource
from zoo.source import ModelSource, Source, fill, new_folder


def open_weights(folder: str | Path) -> Source:
    """A checkpoint of this project or a Hugging Face folder. Raises ConfigError if it is neither or does not fit."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError("folder", folder, "is no folder")
    if (path / checkpoint.CONFIG).exists():
        return CheckpointSource(path)
    if (path / huggingface.CONFIG).exists():
        return HuggingFaceSource(path)
    allowed = f"{checkpoint.CONFIG} (a checkpoint of this project) or {huggingface.CONFIG} (Hugging Face)"
    raise ConfigError("folder", folder, f"needs {allowed}")


def load(folder: str | Path, dtype: Any = None) -> Decoder:
    """The model of a checkpoint or a Hugging Face folder, one block a layer.

    `dtype` is that of its parameters, by default the stored one. Raises ConfigError as `open_weights` does.
    """
    return fill(open_weights(folder), dtype)


def save(model: PyTree, folder: str | Path) -> None:
    """Writes a canonical model as a checkpoint. Raises ConfigError if that exists or the model is of no family."""
    convert(ModelSource(model), checkpoint.write, folder)


def export(model: PyTree, folder: str | Path) -> None:
    """Writes a canonical model, or gradients of its shape, under Hugging Face's names.

    What has no gradient is left out. Raises ConfigError as `save` does.
    """
    convert(ModelSource(model), huggingface.write, folder)


def convert(source: Source, write: Callable[[Path, Source], None], out: str | Path) -> None:
    """Writes the weights with `checkpoint.write` or `huggingface.write`, tensor by tensor: all of them or nothing."""
    with new_folder(Path(out).expanduser()) as partial:
        write(partial, source)
