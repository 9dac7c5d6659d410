"""Several sources as one: which source's which sequence stands at each position of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int64

from recipes.data.sequences import Arrays, Sequences

ENDLESS = 2**62


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixed:
    """Sequences of several sources in proportion to their weights, spread evenly: grain's rule of mixing.

    Each source goes on from one of its sequences to its next, so how far each is follows from the position in the
    run. With `once` an epoch ends when a source would be read again.
    """

    sources: Mapping[str, Sequences]
    weights: tuple[float, ...]
    once: bool = False

    @property
    def num_sequences(self) -> int | None:
        return len(self._places) if self.once else None

    def read(self, positions: Int64[np.ndarray, " batch"]) -> Arrays:
        if (size := self.num_sequences) is not None:
            positions = positions % size
        chosen = np.array([self._places[position] for position in positions.tolist()], np.int64).reshape(-1, 2)
        arrays: dict[str, np.ndarray] = {}
        for number, source in enumerate(self.sources.values()):
            rows = chosen[:, 0] == number
            if rows.any():
                for name, part in source.read(chosen[rows, 1]).items():
                    arrays.setdefault(name, np.empty((len(positions), *part.shape[1:]), part.dtype))[rows] = part
        return arrays

    def cursors(self, position: int) -> dict[str, int]:
        """How many sequences of each source stand before a position of the run."""
        found: dict[int, int] = {}
        while len(found) < len(self.sources):
            number, place = self._places[position]
            found.setdefault(number, place)
            position += 1
        return {name: found[number] for number, name in enumerate(self.sources)}

    @cached_property
    def _places(self) -> Any:
        """`[position]` is (number of the source, position in it)."""
        import grain  # imports jax

        def numbered(number: int, source: Sequences) -> Any:
            size = (source.num_sequences if self.once else None) or ENDLESS
            return grain.MapDataset.range(size).map(lambda place: (number, place))

        parts = [numbered(number, source) for number, source in enumerate(self.sources.values())]
        return grain.MapDataset.mix(parts, self.weights)
