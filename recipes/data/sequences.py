"""Sequences of tokens, each a pure function of its position in the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, Int64

from recipes.data.bytes import SEPARATOR
from recipes.data.documents import Documents

Arrays = Mapping[str, Int32[np.ndarray, "batch tokens"]]
DRAWN_WHOLE = 2**20  # sequences of an epoch whose order is drawn at once; one of more is computed place by place


class Sequences(Protocol):
    """Sequences of one length by their position in the run."""

    @property
    def num_sequences(self) -> int | None:
        """Sequences of an epoch; None if there is no end."""
        ...

    def read(self, positions: Int64[np.ndarray, " batch"]) -> Arrays:
        """`tokens`, `sequence_length + 1` each, and of the same shape `segment_ids`, `positions` and `loss_mask`.

        `segment_ids`: 1 for the first document of a sequence, 2 for the next, a separator belonging to the document
        that it ends; `positions`: from 0 in each; `loss_mask`: 1 where a token is to be learnt.
        """
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed:
    """Sequences cut from documents: each begins on the last token of the one before it, a remainder is left out.

    With a `seed` an epoch visits each sequence once, in an order drawn from (seed, epoch); with None in the order of
    the documents. Epochs follow each other without end.
    """

    documents: Documents
    sequence_length: int
    seed: int | None

    @property
    def num_sequences(self) -> int:
        return max(0, len(self.documents) - 1) // self.sequence_length

    def read(self, positions: Int64[np.ndarray, " batch"]) -> Arrays:
        starts = in_order(positions, self.num_sequences, self.seed) * self.sequence_length
        index = np.arange(self.sequence_length + 1)
        document, place = self.documents.find(starts[:, None] + index)
        return _arrays(self.documents, document, place, np.minimum(place, index))


@dataclass(frozen=True, eq=False, kw_only=True)
class Whole:
    """Sequences of whole documents, as many as fit one after the other, then separators that are not learnt.

    Of a document longer than a sequence the rest is left out. Order and epochs are those of `Packed`.
    """

    documents: Documents
    sequence_length: int
    seed: int | None

    @cached_property
    def firsts(self) -> Int64[np.ndarray, " sequences_and_one"]:
        """The first document of each sequence, and at the end how many there are."""
        ends, firsts = self.documents.ends, [0]
        while firsts[-1] < len(ends):
            first = firsts[-1]
            begin = ends[first - 1] if first else 0
            fitting = int(np.searchsorted(ends, begin + self.sequence_length + 1, side="right"))
            firsts.append(max(fitting, first + 1))
        return np.array(firsts)

    @property
    def num_sequences(self) -> int:
        return len(self.firsts) - 1

    def read(self, positions: Int64[np.ndarray, " batch"]) -> Arrays:
        numbers, ends = in_order(positions, self.num_sequences, self.seed), self.documents.ends
        first, last = self.firsts[numbers][:, None], self.firsts[numbers + 1][:, None] - 1
        begins = np.where(first > 0, ends[first - 1], 0)
        stream = begins + np.arange(self.sequence_length + 1)
        filled = stream >= ends[last]
        document, place = self.documents.find(np.minimum(stream, ends[last] - 1))
        arrays = _arrays(self.documents, document, place, place)
        arrays["segment_ids"] += filled
        arrays["positions"][filled] = (stream - ends[last])[filled]
        arrays["loss_mask"][filled] = 0
        return arrays


def _arrays(documents: Documents, document: Any, place: Any, position: Any) -> dict[str, np.ndarray]:
    arrays = {
        "tokens": documents.tokens(document, place),
        "segment_ids": document - document[:, :1] + 1,
        "positions": position,
        "loss_mask": documents.learnt(document, place),
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def segments(tokens: Int32[np.ndarray, "batch tokens"]) -> dict[str, Int32[np.ndarray, "batch tokens"]]:
    """`segment_ids` and `positions` of random tokens, as if the byte that separates texts did so in them."""
    begins = np.zeros(tokens.shape, bool)
    begins[:, 1:] = tokens[:, :-1] == SEPARATOR
    index = np.arange(tokens.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return {"segment_ids": np.cumsum(begins, axis=1, dtype=np.int32) + 1, "positions": index - first}


def in_order(positions: Int64[np.ndarray, " batch"], size: int, seed: int | None) -> Int64[np.ndarray, " batch"]:
    """Which of `size` sequences stands at each position of the run."""
    epochs, numbers = np.divmod(positions, size)
    if seed is None:
        return numbers
    for epoch in np.unique(epochs):
        rows = epochs == epoch
        numbers[rows] = _shuffled(seed, int(epoch), size, numbers[rows])
    return numbers


def _shuffled(seed: int, epoch: int, size: int, numbers: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
    if size <= DRAWN_WHOLE:
        return _permutation(seed, epoch, size)[numbers]
    import grain.experimental  # imports jax

    key = int(np.random.default_rng([seed, epoch]).integers(2**32))
    shuffle: Any = grain.experimental.index_shuffle
    return np.array([shuffle(number, max_index=size - 1, seed=key, rounds=4) for number in numbers.tolist()])


@lru_cache(maxsize=16)  # of the sources of a mixture, at the turn of an epoch twice
def _permutation(seed: int, epoch: int, size: int) -> Int64[np.ndarray, " size"]:
    order = np.random.default_rng([seed, epoch]).permutation(size)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Endless sequences of tokens drawn uniformly from the vocabulary, by (seed, position, stream)."""

    vocab_size: int
    sequence_length: int
    seed: int
    stream: tuple[int, ...] = ()

    @property
    def num_sequences(self) -> None:
        return None

    def read(self, positions: Int64[np.ndarray, " batch"]) -> Arrays:
        tokens = np.stack([self._draw(position) for position in positions.tolist()])
        return {"tokens": tokens, **segments(tokens), "loss_mask": np.ones_like(tokens)}

    def _draw(self, position: int) -> Int32[np.ndarray, " tokens"]:
        seeds = np.random.SeedSequence([self.seed, position], spawn_key=self.stream)
        return np.random.default_rng(seeds).integers(self.vocab_size, size=self.sequence_length + 1, dtype=np.int32)
