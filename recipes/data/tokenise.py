"""From files to tokens: once, shard by shard, in several processes if asked, into a folder that is kept."""

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from recipes.data import store as stores
from recipes.data.files import Found
from recipes.data.records import Binary, Piece, Reader, Span, Unreadable
from recipes.data.store import Joiner, Shard, Store
from recipes.data.tokenizer import Codec, open_codec
from zoo.checks import ConfigError

SHARD_BYTES = 16 * 2**20  # of files that are tokenised at a time; no setting, so that every run cuts them alike
BATCH_CHARS = 2**20  # of text that the tokenizer is given at a time


@dataclass
class _Batch:
    """Pieces on their way through the tokenizer into a shard."""

    codec: Codec
    named: bool
    supervised: bool
    shard: Shard
    sink: IO[bytes]
    pieces: list[tuple[Piece, str]] = field(default_factory=list)
    num_chars: int = 0
    open_length: int = 0  # tokens of a document that goes on
    digest: Any = None  # of its text

    def add(self, piece: Piece, name: str) -> None:
        self.pieces.append((piece, name))
        self.num_chars += len(piece.text) + len(piece.prompt or "")
        if self.num_chars >= BATCH_CHARS:
            self.flush()

    def flush(self) -> None:
        """Tokenises what is there and appends it."""
        dtype = token_dtype(self.codec)
        prefix = np.asarray(self.codec.prefix, dtype)
        texts = self.codec.encode([piece.text for piece, _ in self.pieces])
        prompts = self.codec.encode([piece.prompt or "" for piece, _ in self.pieces]) if self.supervised else None
        for number, (piece, name) in enumerate(self.pieces):
            parts = [prefix] if piece.first else []
            parts += [prompts[number]] if prompts is not None else []
            parts = [np.asarray(part, dtype) for part in (*parts, texts[number])]
            for part in parts:
                self.sink.write(part.tobytes())
            self.open_length += sum(map(len, parts))
            self.digest = _digested(None if piece.first else self.digest, piece)
            if piece.last:
                self._close(name, self.open_length - len(parts[-1]))
        self.pieces, self.num_chars = [], 0

    def _close(self, name: str, prompt: int) -> None:
        if self.open_length:
            self.shard.lengths.append(self.open_length)
            if self.supervised:
                self.shard.prompts.append(prompt)
            if self.named:
                self.shard.names.append(name)
            self.shard.digests.append(int.from_bytes(self.digest.digest()))
        self.open_length = 0


def _digested(digest: Any, piece: Piece) -> Any:
    """The hash of a document's pieces so far."""
    digest = digest or hashlib.blake2b(f"{piece.prompt or ''}\0".encode(), digest_size=8)
    digest.update(piece.text.encode())
    return digest


def token_dtype(codec: Codec) -> str:
    """The narrowest that holds every token, little-endian."""
    return "|u1" if codec.vocabulary <= 2**8 else "<u2" if codec.vocabulary <= 2**16 else "<u4"


def tokenise(spans: list[Span], reader: Reader, codec: Codec, most: int, sink: IO[bytes]) -> Shard:
    """Writes the tokens of some spans; gives up after `most + 1` malformed records. Raises Unreadable."""
    shard = Shard()
    named, supervised = reader.field is None, reader.prompt_field is not None
    batch = _Batch(codec, named, supervised, shard, sink)
    for span in spans:
        before = shard.lines.get(span.file.path, 0)
        for found in reader.read(span):
            if found is None:
                shard.lines[span.file.path] = shard.lines.get(span.file.path, 0) + 1
            elif isinstance(found, Piece):
                batch.add(found, span.file.name)
            elif isinstance(found, Binary):
                shard.num_skipped += 1
            else:
                shard.malformed.append(replace(found, line=found.line + before))
                if len(shard.malformed) > most:
                    return shard
    batch.flush()
    return shard


def shards(found: Found, reader: Reader) -> list[list[Span]]:
    """What is tokenised at a time: files together up to `SHARD_BYTES`, long files of lines in parts."""
    spans = []
    for file in found.files:
        if reader.field is None or file.packed:
            spans.append((file.num_bytes, Span(file)))
        else:
            cuts = [*range(0, file.num_bytes, SHARD_BYTES), file.num_bytes]
            spans += [(stop - start, Span(file, start, stop)) for start, stop in pairwise(cuts)]
    grouped, size = [[]], 0
    for num_bytes, span in spans:
        if grouped[-1] and size + num_bytes > SHARD_BYTES:
            grouped, size = [*grouped, []], 0
        grouped[-1].append(span)
        size += num_bytes
    return grouped


def read(found: Found, reader: Reader, codec: Codec, most: int) -> Store:
    """The documents of small files, tokenised in memory. Raises ConfigError as `into` does."""
    sink, joined = io.BytesIO(), Joiner(len(found.files), found.num_skipped)
    spans = [span for shard in shards(found, reader) for span in shard]
    with _explained(found):
        _take(joined, tokenise(spans, reader, codec, most, sink), found, most)
    tokens = np.frombuffer(sink.getvalue(), token_dtype(codec))
    return stores.in_memory(joined, tokens)


def into(folder: Path, found: Found, reader: Reader, codec: Codec, most: int, readers: int) -> None:
    """Tokenises into a folder that is there, with `readers` processes; none: by itself. Raises ConfigError."""
    joined = Joiner(len(found.files), found.num_skipped)
    jobs = [
        _Job(spans, reader, codec.spec, codec.fingerprint, most, folder / f"{number}.part")
        for number, spans in enumerate(shards(found, reader))
    ]
    with _explained(found), _mapped(readers) as mapped, (folder / stores.TOKENS).open("wb") as tokens:
        for job, shard in zip(jobs, mapped(_Job.run, jobs), strict=True):
            _take(joined, shard, found, most)
            stores.append(tokens, job.part)
    stores.write(folder, joined, token_dtype(codec))


class _Job(NamedTuple):
    """A shard to tokenise, in whatever process."""

    spans: list[Span]
    reader: Reader
    codec: tuple[str | None, str | None]
    fingerprint: str
    most: int
    part: Path

    def run(self) -> Shard:
        with self.part.open("wb") as sink:
            return tokenise(self.spans, self.reader, _codec(self.codec, self.fingerprint), self.most, sink)


@lru_cache(maxsize=1)  # a large vocabulary takes a second to read
def _codec(spec: tuple[str | None, str | None], fingerprint: str) -> Codec:
    codec = open_codec(*spec)
    if codec.fingerprint != fingerprint:
        raise Unreadable(spec[0], "changed while it was used")
    return codec


def _take(joined: Joiner, shard: Shard, found: Found, most: int) -> None:
    """Joins a shard. Raises ConfigError at the first malformed record that is one too many."""
    for where, what in joined.add(shard):
        if joined.told.num_malformed > most:
            raise too_many(found.key, where, what, most)


def too_many(key: str, where: str, what: str, most: int) -> ConfigError:
    """The error about a malformed record when `most` were met before it."""
    hint = "data.max_malformed=N skips up to N such records"
    if most:
        hint = f"{most} such records were skipped before it, as many as data.max_malformed allows"
    return ConfigError(key, where, what, hint=hint)


def _mapped(readers: int) -> AbstractContextManager[Callable]:
    """A `map` in order, over `readers` processes; in this one, with the tokenizer's own threads, if there are none."""
    if not readers:
        return nullcontext(map)
    from recipes.data.readers import processes

    return processes(readers)


@contextmanager
def _explained(found: Found) -> Iterator[None]:
    try:
        yield
    except Unreadable as error:
        path, problem = error.args
        raise ConfigError(found.key, path, problem) from error
