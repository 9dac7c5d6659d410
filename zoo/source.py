"""Weights, wherever they are: a model in memory, this project's checkpoint, a Hugging Face folder."""

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from layers.buffer import split_buffers
from zoo.base import Decoder
from zoo.checks import ConfigError
from zoo.folders import CONFIG, Folder, Remote, short
from zoo.models import abstract
from zoo.paths import flat
from zoo.registry import FAMILIES, ModelConfig
from zoo.tensors import Spec


class Layout(NamedTuple):
    """How Hugging Face files hold the weights, so that an export gives back what was imported.

    `fused_experts`: the experts of a layer in one tensor; `copies`: tensors that repeat others (a tied head).
    """

    fused_experts: bool = False
    copies: tuple[str, ...] = ()


@runtime_checkable
class Source(Protocol):
    """Weights by canonical path (`layers.blocks.3.mlp.up_proj.weight`), read one leaf at a time.

    `files` are what belongs beside the weights (tokenizer, the published configuration), by name. `layout` is None
    where the weights never were Hugging Face's. `notices` are what a person should know.
    """

    config: ModelConfig
    specs: Mapping[str, Spec]
    layout: Layout | None
    files: Mapping[str, Folder]
    notices: tuple[str, ...]

    def read(self, path: str) -> np.ndarray: ...
    def rows(self, path: str) -> Iterator[np.ndarray]:
        """The leaf's parts along its first dim, one after another."""
        ...


class ModelSource:
    """A model in memory, or gradients of its shape (None where there is none)."""

    def __init__(self, model: PyTree):
        self.config = config_of(model)
        self._leaves = flat(model)
        wanted = flat(abstract(self.config))
        for path, leaf in self._leaves.items():
            if path not in wanted or tuple(leaf.shape) != tuple(wanted[path].shape):
                raise ConfigError("model", f"{path}: {list(leaf.shape)}", f"does not fit {self.config}")
        self.specs: Mapping[str, Spec] = {
            path: Spec(tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in self._leaves.items()
        }
        self.layout: Layout | None = None
        self.files: Mapping[str, Folder] = {}
        self.notices: tuple[str, ...] = ()

    def read(self, path: str) -> np.ndarray:
        return np.asarray(self._leaves[path])

    def rows(self, path: str) -> Iterator[np.ndarray]:
        return iter(self.read(path))


class Watched:
    """The weights of a source; `report` is told the bytes read so far."""

    def __init__(self, source: Source, report: Callable[[int], None]):
        self._source, self._report, self._done = source, report, 0
        self.config, self.specs, self.layout = source.config, source.specs, source.layout
        self.files, self.notices = source.files, source.notices

    def read(self, path: str) -> np.ndarray:
        return self._counted(self._source.read(path))

    def rows(self, path: str) -> Iterator[np.ndarray]:
        return map(self._counted, self._source.rows(path))

    def _counted(self, array: np.ndarray) -> np.ndarray:
        self._done += array.nbytes
        self._report(self._done)
        return array


def config_of(model: PyTree) -> ModelConfig:
    """The configuration of a canonical model. Raises ConfigError if it is of no family or placed."""
    blocks = getattr(getattr(model, "layers", None), "blocks", None)
    if not isinstance(model, Decoder) or blocks is None:
        hint = "recipes.unplace(model) makes a placed model canonical again"
        raise ConfigError("model", type(model).__name__, "is no canonical model of this project", hint=hint)
    for family in FAMILIES:
        config = importlib.import_module(f"zoo.{family}.model").config_of(model)
        if config is not None:
            return config
    raise ConfigError("model", "a decoder", "is of no family that has a file format", allowed=FAMILIES)


def fill(source: Source, dtype: Any = None, shardings: PyTree = None) -> Decoder:
    """The model with the source's weights, in `dtype` or as they are stored; buffers are float32 always.

    With `shardings`, a tree of the model's structure, each device gets its parts of the leaves, read one by one.
    """
    model = abstract(source.config)
    _, buffers = split_buffers(model)
    kept = set(flat(buffers))
    splits = {} if shardings is None else flat(shardings)

    def put(path: str, leaf: np.ndarray) -> jax.Array:
        wide = jnp.float32 if path in kept else dtype or leaf.dtype
        if path not in splits:
            return jnp.asarray(leaf, wide)
        return jax.make_array_from_callback(leaf.shape, splits[path], lambda index: leaf[index].astype(wide))

    leaves = [put(path, source.read(path)) for path in flat(model)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


@contextmanager
def new_folder(out: Folder) -> Iterator[Folder]:
    """A folder beside `out` that becomes `out` if all went well and vanishes if not; in an object store `out` itself.

    Raises ConfigError if `out` is there already, or cannot be made.
    """
    if isinstance(out, Remote):
        with _new_remote(out):
            yield out
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("out", out, "exists already; nothing is overwritten")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError("out", out, f"cannot be made: {error.strerror}") from error
    try:
        yield partial
        partial.chmod(0o755)
        partial.replace(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):  # such as a full disk
            raise ConfigError("out", out, f"cannot be written: {error.strerror or error}") from error
        raise


@contextmanager
def _new_remote(out: Remote) -> Iterator[None]:
    try:
        if (out / CONFIG).exists() or out.names():
            raise ConfigError("out", out, "exists already; nothing is overwritten")
    except OSError as error:
        raise ConfigError("out", out, f"cannot be made: {error.strerror}") from error
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            out.remove()
        if isinstance(error, OSError):
            raise ConfigError("out", out, f"cannot be written: {error.strerror or short(error)}") from error
        raise
