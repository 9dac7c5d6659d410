"""Models out of folders and into them."""

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
    path = Path(folder)
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
    source = ModelSource(model)
    with new_folder(Path(folder)) as partial:
        checkpoint.write(partial, source)


def export(model: PyTree, folder: str | Path) -> None:
    """Writes a canonical model, or gradients of its shape, under Hugging Face's names.

    What has no gradient is left out. Raises ConfigError as `save` does.
    """
    source = ModelSource(model)
    with new_folder(Path(folder)) as partial:
        huggingface.write(partial, source)


def import_folder(folder: str | Path, out: str | Path) -> Source:
    """A Hugging Face folder as a checkpoint, tensor by tensor; returns what was read."""
    source = HuggingFaceSource(Path(folder))
    with new_folder(Path(out)) as partial:
        checkpoint.write(partial, source)
    return source


def export_folder(folder: str | Path, out: str | Path) -> Source:
    """A checkpoint as a Hugging Face folder, leaf by leaf; returns what was read."""
    source = CheckpointSource(Path(folder))
    with new_folder(Path(out)) as partial:
        huggingface.write(partial, source)
    return source
