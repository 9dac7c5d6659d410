"""Sequences of tokens, each a pure function of its position in the run."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int32, Int64, UInt8


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed:
    """Sequences cut from a corpus: each begins on the last token of the one before it, a remainder is left out.

    With a `seed` an epoch visits each sequence once, in an order drawn from (seed, epoch); with None in the order of
    the corpus. Epochs follow each other without end.
    """

    corpus: UInt8[np.ndarray, " tokens"]
    sequence_length: int
    seed: int | None

    @property
    def num_sequences(self) -> int:
        """Sequences of an epoch."""
        return (len(self.corpus) - 1) // self.sequence_length

    def read(self, positions: Int64[np.ndarray, " batch"]) -> Int32[np.ndarray, "batch tokens"]:
        """Sequences of `sequence_length + 1` tokens."""
        starts = self._order(positions) * self.sequence_length
        return self.corpus[starts[:, None] + np.arange(self.sequence_length + 1)].astype(np.int32)

    def _order(self, positions: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        epochs, numbers = np.divmod(positions, self.num_sequences)
        if self.seed is None:
            return numbers
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            numbers[rows] = _permutation(self.seed, int(epoch), self.num_sequences)[numbers[rows]]
        return numbers


@lru_cache(maxsize=2)
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
        """There is no epoch."""
        return None

    def read(self, positions: Int64[np.ndarray, " batch"]) -> Int32[np.ndarray, "batch tokens"]:
        """Sequences of `sequence_length + 1` tokens."""
        return np.stack([self._draw(position) for position in positions.tolist()])

    def _draw(self, position: int) -> Int32[np.ndarray, " tokens"]:
        seeds = np.random.SeedSequence([self.seed, position], spawn_key=self.stream)
        return np.random.default_rng(seeds).integers(self.vocab_size, size=self.sequence_length + 1, dtype=np.int32)
