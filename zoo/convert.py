"""Models out of folders and into them."""

from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from zoo import checkpoint, huggingface
from zoo.base import Decoder
from zoo.checkpoint import CheckpointSource
from zoo.checks import ConfigError
from zoo.folders import Folder, Remote, at
from zoo.huggingface import HuggingFaceSource
from zoo.source import ModelSource, Source, fill, new_folder


def open_weights(folder: str | Folder) -> Source:
    """A checkpoint of this project, local or in an object store, or a Hugging Face folder.

    Raises ConfigError if it is neither or does not fit.
    """
    path = at(folder)
    if isinstance(path, Remote):
        return CheckpointSource(_complete(path))
    if not path.is_dir():
        raise ConfigError("folder", folder, "is no folder")
    if (path / checkpoint.CONFIG).exists():
        return CheckpointSource(path)
    if (path / huggingface.CONFIG).exists():
        return HuggingFaceSource(path)
    allowed = f"{checkpoint.CONFIG} (a checkpoint of this project) or {huggingface.CONFIG} (Hugging Face)"
    raise ConfigError("folder", folder, f"needs {allowed}")


def _complete(folder: Remote) -> Remote:
    """Raises ConfigError unless there is a checkpoint; a Hugging Face folder is read from a file system."""
    try:
        if not (folder / checkpoint.CONFIG).exists():
            raise ConfigError("folder", folder, f"holds no {checkpoint.CONFIG}: it is no checkpoint of this project")
    except OSError as error:
        raise ConfigError("folder", folder, f"cannot be read: {error.strerror}") from error
    return folder


def load(folder: str | Folder, dtype: Any = None) -> Decoder:
    """The model of a checkpoint or a Hugging Face folder, one block a layer.

    `dtype` is that of its parameters, by default the stored one. Raises ConfigError as `open_weights` does.
    """
    return fill(open_weights(folder), dtype)


def save(model: PyTree, folder: str | Folder) -> None:
    """Writes a canonical model as a checkpoint. Raises ConfigError if that exists or the model is of no family."""
    convert(ModelSource(model), checkpoint.write, folder)


def export(model: PyTree, folder: str | Folder) -> None:
    """Writes a canonical model, or gradients of its shape, under Hugging Face's names.

    What has no gradient is left out. Raises ConfigError as `save` does.
    """
    convert(ModelSource(model), huggingface.write, folder)


def convert(source: Source, write: Callable[[Any, Source], None], out: str | Folder) -> None:
    """Writes the weights with `checkpoint.write` or `huggingface.write`, tensor by tensor: all of them or nothing."""
    folder = at(out, "out")
    if isinstance(folder, Remote) and write is huggingface.write:
        raise ConfigError("out", out, "must be a local folder: only checkpoints are written into a store")
    with new_folder(folder) as partial:
        write(partial, source)
