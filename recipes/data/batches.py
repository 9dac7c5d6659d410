"""Batches of sequences, each a pure function of its place in the run."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64

from recipes.data.config import DataConfig
from recipes.data.documents import Documents
from recipes.data.mixture import Mixed
from recipes.data.sequences import Arrays, Packed, Sequences, Synthetic, Whole
from recipes.data.source import Corpus, Source
from zoo.checks import ConfigError


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batches of sequences of `sequence_length + 1` tokens: all but the last are inputs, all but the first targets.

    `arrays` names what a batch is made of (see `DataConfig.arrays`), `notices` are what a person should know.
    """

    sequences: Sequences
    arrays: tuple[str, ...] = ("tokens",)
    notices: tuple[str, ...] = ()

    @property
    def num_sequences(self) -> int | None:
        """Sequences of an epoch; None if the data is endless."""
        return self.sequences.num_sequences

    def sequence(self, position: int) -> Int32[np.ndarray, " tokens"]:
        """The tokens of one sequence: those of any batch that reaches over `position`."""
        return self.batch(position, 1)["tokens"][0]

    def batch(self, cursor: int, batch_size: int) -> Arrays:
        """Sequences `cursor` to `cursor + batch_size - 1` of the run, as `Sequences.read` describes them.

        Raises ConfigError unless `batch_size` is above zero, ValueError if `cursor` is not a place in the run.
        """
        if batch_size <= 0:
            raise ConfigError("train.batch_size", batch_size, "must be above zero")
        if cursor < 0:
            raise ValueError(f"Expected {cursor=} to be zero or above")
        return self.read(np.arange(cursor, cursor + batch_size, dtype=np.int64))

    def read(self, positions: Int64[np.ndarray, " batch"]) -> Arrays:
        """The sequences at any positions of the run."""
        found = self.sequences.read(positions)
        return {name: found[name] for name in self.arrays}

    def cursors(self, position: int) -> dict[str, int]:
        """How many sequences of each source stand before a position of the run; "" is a source without a name."""
        return self.sequences.cursors(position) if isinstance(self.sequences, Mixed) else {"": position}


def train_batches(config: DataConfig, corpus: Corpus, *, sequence_length: int, vocab_size: int) -> Batches:
    """Shuffled batches to train on. Raises ConfigError if a source is shorter than one sequence."""
    _require_positive_length(sequence_length)
    if config.source == "synthetic":
        sequences = Synthetic(vocab_size=vocab_size, sequence_length=sequence_length, seed=config.seed)
        return Batches(sequences=sequences, arrays=config.arrays)

    parts: dict[str, Packed | Whole] = {}
    notices = []
    for source in corpus.sources:
        fitting, left_out = _fitting(source.train, sequence_length)
        _require_sequence(f"training text{_of(source.name)}", fitting, sequence_length)
        parts[source.name] = _cut(fitting, sequence_length, _seed(config.seed, source.name))
        if left_out:
            notices.append(f"{left_out:,} records{_of(source.name)} are left out: their prompts fill a sequence")
    sequences = _joined(corpus.sources, parts, once=False)
    return Batches(sequences=sequences, arrays=config.arrays, notices=tuple(notices))


def validation_batches(config: DataConfig, corpus: Corpus, *, sequence_length: int, vocab_size: int) -> Batches:
    """Batches to validate on, in order. Raises ConfigError if a held-out part is shorter than one sequence."""
    _require_positive_length(sequence_length)
    if config.source == "synthetic":
        sequences = Synthetic(vocab_size=vocab_size, sequence_length=sequence_length, seed=config.seed, stream=(1,))
        return Batches(sequences=sequences, arrays=config.arrays)

    sources = corpus.sources if config.validation_path is None else corpus.sources[:1]  # the same for all
    parts: dict[str, Packed | Whole] = {}
    for source in sources:
        remedy = ", or raise data.validation_fraction"
        fitting, _ = _fitting(source.validation, sequence_length)
        _require_sequence(f"validation text{_of(source.name)}", fitting, sequence_length, remedy)
        parts[source.name] = _cut(fitting, sequence_length, None)
    return Batches(sequences=_joined(sources, parts, once=True), arrays=config.arrays)


def _fitting(documents: Documents, sequence_length: int) -> tuple[Documents, int]:
    """Those of which a sequence can hold something to learn, and how many others there are."""
    if not len(documents.prompts):
        return documents, 0
    fits = documents.prompts <= sequence_length
    kept = {name: getattr(documents, name)[fits] for name in ("starts", "lengths", "prompts")}
    return dataclasses.replace(documents, **kept), int(np.count_nonzero(~fits))


def _cut(documents: Documents, sequence_length: int, seed: int | None) -> Packed | Whole:
    """Records with prompts are kept whole: what is learnt of one needs its prompt before it."""
    kind: Callable = Whole if len(documents.prompts) else Packed
    return kind(documents=documents, sequence_length=sequence_length, seed=seed)


def _joined(sources: Iterable[Source], parts: dict[str, Packed | Whole], *, once: bool) -> Sequences:
    if len(parts) == 1:
        return next(iter(parts.values()))
    return Mixed(sources=parts, weights=tuple(source.weight for source in sources), once=once)


def _seed(seed: int, name: str) -> int:
    """Sources of a mixture have orders of their own."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) if name else seed


def _of(name: str) -> str:
    return f" of {name}" if name else ""


def _require_positive_length(sequence_length: int) -> None:
    if sequence_length <= 0:
        raise ConfigError("train.sequence_length", sequence_length, "must be above zero")


def _require_sequence(part: str, documents: Documents, sequence_length: int, remedy: str = "") -> None:
    if len(documents.store.prompts):
        if documents.num_documents:
            return
        problem, hint = f"all prompts of the {part} fill a sequence", "use longer sequences"
    else:
        if len(documents) > sequence_length:
            return
        needed = f"a sequence with its last target needs {sequence_length + 1}"
        problem = f"the {part} has {len(documents)} tokens, and {needed}"
        hint = f"use shorter sequences or more text{remedy}"
    raise ConfigError("train.sequence_length", sequence_length, problem, hint=hint)
