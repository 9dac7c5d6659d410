"""Tokens to train on and tokens to validate on."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
from jaxtyping import UInt8

from recipes.data import files
from recipes.data.bytes import SEPARATOR, VOCABULARY
from recipes.data.config import DataConfig
from zoo.checks import ConfigError


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Documents one after the other, each ended by `SEPARATOR`; read-only. Of `synthetic` data all is empty.

    `num_skipped_files` counts the files of a folder that were taken for binary.
    """

    train: UInt8[np.ndarray, " train_tokens"]
    validation: UInt8[np.ndarray, " validation_tokens"]
    num_train_documents: int
    num_validation_documents: int
    num_skipped_files: int = 0


def load(config: DataConfig, vocab_size: int) -> Corpus:
    """Reads the documents, holds some out for validation and puts both in an order that the seed decides.

    A document is a file, and a copy under another name is another document. Whether a file is held out depends on
    (seed, path below the root) only, save that each side gets at least one; a single file gives its tail.

    Raises ConfigError if `vocab_size` has no room for bytes or the source holds no text (see `files`).
    """
    if config.source == "synthetic":
        return _corpus([], [], 0)
    if vocab_size < VOCABULARY:
        problem = f"data.source={config.source} has {VOCABULARY} tokens, one a byte"
        raise ConfigError("model.vocab_size", vocab_size, problem, hint="or use data.source=synthetic")
    found = files.stdlib() if config.source == "stdlib" else files.text(config.path or "")
    if len(found.contents) == 1:
        train, validation = _split_bytes(config, *found.contents.values())
    else:
        train, validation = _split_files(config, found.contents)
    return _corpus(train, validation, found.num_skipped)


def documents(config: DataConfig) -> list[bytes]:
    """All documents in the order of their paths. Raises ConfigError as `load` does; `synthetic` data has none."""
    found = files.stdlib() if config.source == "stdlib" else files.text(config.path or "")
    return list(found.contents.values())


def _corpus(train: list[bytes], validation: list[bytes], num_skipped_files: int) -> Corpus:
    return Corpus(
        train=_pack(train),
        validation=_pack(validation),
        num_train_documents=len(train),
        num_validation_documents=len(validation),
        num_skipped_files=num_skipped_files,
    )


def _pack(documents: list[bytes]) -> UInt8[np.ndarray, " tokens"]:
    separator = bytes([SEPARATOR])
    return np.frombuffer(separator.join([*documents, b""]), np.uint8)


def _split_files(config: DataConfig, contents: dict[PurePath, bytes]) -> tuple[list[bytes], list[bytes]]:
    """Orders files by a hash that is uniform in [0, 1) and holds out those below the validation fraction."""
    hashes = {path: _uniform(config.seed, path) for path in contents}
    paths = sorted(contents, key=lambda path: (hashes[path], path))
    below = sum(value < config.validation_fraction for value in hashes.values())
    num_validation = min(max(below, 1), len(paths) - 1)
    documents = [contents[path] for path in paths]
    return documents[num_validation:], documents[:num_validation]


def _uniform(seed: int, path: PurePath) -> float:
    name = os.fsencode(path.as_posix())
    digest = hashlib.sha256(b"%d/%s" % (seed, name)).digest()
    return int.from_bytes(digest[:8]) / 2**64


def _split_bytes(config: DataConfig, content: bytes) -> tuple[list[bytes], list[bytes]]:
    """Holds out the tail, cut before a whole character."""
    cut = len(content) - max(1, round(len(content) * config.validation_fraction))
    while cut > 0 and content[cut] & 0xC0 == 0x80:
        cut -= 1
    if cut <= 0:
        problem = f"is a single file of {len(content)} bytes, too short to hold out data.validation_fraction of it"
        raise ConfigError("data.path", config.path, problem)
    return [content[:cut]], [content[cut:]]
