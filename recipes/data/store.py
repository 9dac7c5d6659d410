"""Tokenised documents, in memory or in a folder of memory-mapped files."""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Int64, Integer, UInt64

from recipes.data.records import Malformed

TOKENS, META = "tokens.bin", "meta.json"
ARRAYS = ("lengths", "prompts", "digests")
MAX_KEPT = 1000  # malformed records that are named


@dataclass
class Told:
    """What was met besides documents.

    - `names`: of whole texts, the name of each below what was asked for.
    - `malformed`: `(where, what)` of records that were skipped, at most `MAX_KEPT`; `num_malformed`: of all.
    - `num_skipped`: files that were left out, as binary or of another kind.
    """

    num_files: int = 0
    names: list[str] = field(default_factory=list)
    malformed: list[tuple[str, str]] = field(default_factory=list)
    num_malformed: int = 0
    num_skipped: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Store:
    """Documents one after another, without separators, in the order of files and lines; read-only.

    - `tokens`: all of them; `lengths`: of each document; `prompts`: how many of its tokens are a prompt, or empty.
    - `digests`: of each document's text.
    - `folder`: where it lies on disk; None: in memory.
    """

    tokens: Integer[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    prompts: Int64[np.ndarray, " documents_or_none"]
    digests: UInt64[np.ndarray, " documents"]
    told: Told
    folder: Path | None = None

    def __reduce__(self) -> Any:
        """Another process maps the files itself."""
        if self.folder is not None:
            return open_store, (self.folder,)
        return _in_memory, (self.tokens, self.lengths, self.prompts, self.digests, self.told)

    @cached_property
    def starts(self) -> Int64[np.ndarray, " documents"]:
        """Where each document begins in `tokens`."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass
class Shard:
    """A part of a store that was just tokenised; its tokens lie in a file."""

    lengths: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    malformed: list[Malformed] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)  # that were read of each file
    num_skipped: int = 0


class Joiner:
    """Shards in order, as one store: line numbers go on within a file, what is malformed is counted."""

    def __init__(self, num_files: int, num_skipped: int):
        self.told = Told(num_files=num_files, num_skipped=num_skipped)
        self._lines: dict[str, int] = {}
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in ARRAYS}

    def add(self, shard: Shard) -> Iterable[tuple[str, str]]:
        """Takes a shard; gives where and what its malformed records are."""
        for name in ARRAYS:
            self._parts[name].append(np.asarray(getattr(shard, name), np.uint64 if name == "digests" else np.int64))
        self.told.names += shard.names
        self.told.num_skipped += shard.num_skipped
        for each in shard.malformed:
            line = each.line + self._lines.get(each.file.path, 0)
            entry = (each.file.path, str(replace(each, line=line)))
            self.told.num_malformed += 1
            if len(self.told.malformed) < MAX_KEPT:
                self.told.malformed.append(entry)
            yield entry
        for path, lines in shard.lines.items():
            self._lines[path] = self._lines.get(path, 0) + lines

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}


def in_memory(joined: Joiner, tokens: Integer[np.ndarray, " tokens"]) -> Store:
    arrays: dict[str, Any] = joined.arrays()
    return Store(tokens=tokens, told=joined.told, **arrays)


def write(folder: Path, joined: Joiner, dtype: str) -> None:
    """What belongs beside the tokens, which are in the folder already."""
    for name, array in joined.arrays().items():
        np.save(folder / f"{name}.npy", array)
    (folder / META).write_text(json.dumps({"dtype": dtype, "told": vars(joined.told)}))


def open_store(folder: Path) -> Store:
    """The store of a folder, mapped rather than read. Raises ValueError or OSError if it is not whole."""
    meta: Mapping[str, Any] = json.loads((folder / META).read_text())
    arrays: dict[str, Any] = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    told = Told(**meta["told"])
    told.malformed = [(where, what) for where, what in told.malformed]
    size = (folder / TOKENS).stat().st_size
    tokens = np.memmap(folder / TOKENS, meta["dtype"], "r") if size else np.zeros(0, meta["dtype"])
    if len(tokens) != int(arrays["lengths"].sum()):
        raise ValueError(f"{folder / TOKENS} has {len(tokens)} tokens, not {int(arrays['lengths'].sum())}")
    return Store(tokens=tokens, told=told, folder=folder, **arrays)


def _in_memory(tokens: np.ndarray, lengths: np.ndarray, prompts: np.ndarray, digests: np.ndarray, told: Told) -> Store:
    return Store(tokens=tokens, lengths=lengths, prompts=prompts, digests=digests, told=told)


def append(target: IO[bytes], part: Path) -> None:
    """Moves a shard's tokens to the end of the store's."""
    with part.open("rb") as stream:
        shutil.copyfileobj(stream, target, 2**22)
    part.unlink()
