"""Batches of sequences, each a pure function of its place in the run."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, UInt8

from recipes.data.bytes import SEPARATOR
from recipes.data.config import DataConfig
from recipes.data.sequences import Packed, Synthetic
from recipes.data.source import Corpus
from zoo.checks import ConfigError


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batches of sequences of `sequence_length + 1` tokens: all but the last are inputs, all but the first targets."""

    sequences: Packed | Synthetic
    document_mask: bool = False

    @property
    def num_sequences(self) -> int | None:
        """Sequences of an epoch; None if the data is endless."""
        return self.sequences.num_sequences

    def sequence(self, position: int) -> Int32[np.ndarray, " tokens"]:
        """The tokens of one sequence: those of any batch that reaches over `position`."""
        return self.batch(position, 1)["tokens"][0]

    def batch(self, cursor: int, batch_size: int) -> dict[str, Int32[np.ndarray, "batch tokens"]]:
        """Sequences `cursor` to `cursor + batch_size - 1` of the run.

        `tokens`, and with `document_mask` also `segment_ids` and `positions` (see `documents`). Raises ConfigError
        unless `batch_size` is above zero, ValueError if `cursor` is not a place in the run.
        """
        if batch_size <= 0:
            raise ConfigError("train.batch_size", batch_size, "must be above zero")
        if cursor < 0:
            raise ValueError(f"Expected {cursor=} to be zero or above")
        tokens = self.sequences.read(np.arange(cursor, cursor + batch_size, dtype=np.int64))
        return {"tokens": tokens, **documents(tokens)} if self.document_mask else {"tokens": tokens}


def documents(tokens: Int32[np.ndarray, "batch tokens"]) -> dict[str, Int32[np.ndarray, "batch tokens"]]:
    """`segment_ids` (1 for the first document of a sequence, 2 for the next) and `positions` (from 0 in each).

    A separator belongs to the document that it ends.
    """
    begins = np.zeros(tokens.shape, bool)
    begins[:, 1:] = tokens[:, :-1] == SEPARATOR
    index = np.arange(tokens.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return {"segment_ids": np.cumsum(begins, axis=1, dtype=np.int32) + 1, "positions": index - first}


def train_batches(config: DataConfig, corpus: Corpus, *, sequence_length: int, vocab_size: int) -> Batches:
    """Shuffled batches to train on. Raises ConfigError if the corpus is shorter than one sequence."""
    _require_positive_length(sequence_length)
    if config.source == "synthetic":
        sequences = Synthetic(vocab_size=vocab_size, sequence_length=sequence_length, seed=config.seed)
    else:
        _require_sequence("training", corpus.train, sequence_length)
        sequences = Packed(corpus=corpus.train, sequence_length=sequence_length, seed=config.seed)
    return Batches(sequences=sequences, document_mask=config.document_mask)


def validation_batches(config: DataConfig, corpus: Corpus, *, sequence_length: int, vocab_size: int) -> Batches:
    """Batches to validate on, in order. Raises ConfigError if the held-out part is shorter than one sequence."""
    _require_positive_length(sequence_length)
    if config.source == "synthetic":
        sequences = Synthetic(vocab_size=vocab_size, sequence_length=sequence_length, seed=config.seed, stream=(1,))
    else:
        _require_sequence("validation", corpus.validation, sequence_length, ", or raise data.validation_fraction")
        sequences = Packed(corpus=corpus.validation, sequence_length=sequence_length, seed=None)
    return Batches(sequences=sequences, document_mask=config.document_mask)


def _require_positive_length(sequence_length: int) -> None:
    if sequence_length <= 0:
        raise ConfigError("train.sequence_length", sequence_length, "must be above zero")


def _require_sequence(part: str, tokens: UInt8[np.ndarray, " tokens"], sequence_length: int, remedy: str = "") -> None:
    if len(tokens) <= sequence_length:
        problem = (
            f"the {part} text has {len(tokens)} tokens, and a sequence with its last target needs {sequence_length + 1}"
        )
        hint = f"use shorter sequences or more text{remedy}"
        raise ConfigError("train.sequence_length", sequence_length, problem, hint=hint)
