"""Documents in an order, as one stream of tokens that is nowhere written down."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64, Integer

from recipes.data.store import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class Documents:
    """Documents of a store one after the other, each ended by `separator`: `documents[positions]` are tokens.

    - `starts`, `lengths`: where each begins in the store and how long it is, above zero.
    - `prompts`: how many of its first tokens are a prompt, or empty.
    """

    store: Store
    separator: int
    starts: Int64[np.ndarray, " documents"]
    lengths: Int64[np.ndarray, " documents"]
    prompts: Int64[np.ndarray, " documents_or_none"]

    @cached_property
    def ends(self) -> Int64[np.ndarray, " documents"]:
        """The position after each document's separator."""
        return np.cumsum(self.lengths + 1)

    def __len__(self) -> int:
        """All tokens, separators included."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, positions: Int64[np.ndarray, "..."]) -> Integer[np.ndarray, "..."]:
        return self.tokens(*self.find(positions))

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def find(self, positions: Int64[np.ndarray, "..."]) -> tuple[Int64[np.ndarray, "..."], Int64[np.ndarray, "..."]]:
        """The document at each position, and the place in it: `lengths` of it for its separator."""
        document = np.searchsorted(self.ends, positions, side="right")
        return document, positions - (self.ends[document] - self.lengths[document] - 1)

    def tokens(self, document: Int64[np.ndarray, "..."], place: Int64[np.ndarray, "..."]) -> Integer[np.ndarray, "..."]:
        """The tokens at places of documents."""
        last = self.lengths[document] - 1
        found = self.store.tokens[self.starts[document] + np.minimum(place, last)]
        return np.where(place > last, self.separator, found.astype(np.int32))

    def learnt(self, document: Int64[np.ndarray, "..."], place: Int64[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
        """Whether places of documents are after the prompt."""
        return place >= self.prompts[document] if len(self.prompts) else np.ones(place.shape, bool)


def ordered(store: Store, separator: int, order: Int64[np.ndarray, " documents"]) -> Documents:
    """Some documents of a store, in that order."""
    prompts = store.prompts[order] if len(store.prompts) else store.prompts
    return Documents(
        store=store, separator=separator, starts=store.starts[order], lengths=store.lengths[order], prompts=prompts
    )


def divided(store: Store, separator: int, cut: int) -> tuple[Documents, Documents]:
    """The tokens of a store's only document before and after a cut, as a document each."""
    prompt = int(store.prompts[0]) if len(store.prompts) else None

    def part(start: int, stop: int) -> Documents:
        prompts = [] if prompt is None else [min(max(prompt - start, 0), stop - start)]
        sizes = {"starts": [start], "lengths": [stop - start], "prompts": prompts}
        return Documents(store=store, separator=separator, **{k: np.asarray(v, np.int64) for k, v in sizes.items()})

    return part(0, cut), part(cut, int(store.lengths[0]))
