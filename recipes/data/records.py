"""Documents in files: whole texts, or records of JSON lines; what cannot be read is named by file and line."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, NamedTuple

from recipes.data.files import File

BINARY_PROBE_BYTES = 8192
PIECE_BYTES = 2**20  # of a long text, read and tokenised at a time
_BOM = codecs.BOM_UTF8


class Piece(NamedTuple):
    """Text of a document, the first piece with its prompt if it has one; `last` ends it."""

    text: str
    prompt: str | None = None
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Malformed:
    """A document that cannot be read. `line` counts from 1, of a span from its first line."""

    file: File
    line: int
    problem: str
    of_line: bool

    def __str__(self) -> str:
        return f"line {self.line} {self.problem}" if self.of_line else f"{self.problem}, in line {self.line}"


@dataclass(frozen=True)
class Binary:
    """A file of a folder that is no text."""

    file: File


class Unreadable(Exception):
    """A file that cannot be read on: `(path, problem)`."""


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin from byte `start` on and before byte `stop`; None is its end."""

    file: File
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Reader:
    """How documents are read from files: JSON lines with a `field`, or whole texts if that is None.

    `alone`: the file was named by itself, so a binary one is malformed rather than left out.
    """

    field: str | None = None
    prompt_field: str | None = None
    alone: bool = False

    def read(self, span: Span) -> Iterator[Piece | Malformed | Binary | None]:
        """What a span holds, without empty documents; None for each line that was read.

        Raises Unreadable where the file system or gzip fails.
        """
        try:
            if self.field is None:
                yield from self._text(span.file)
            else:
                yield from self._lines(span)
        except EOFError as error:
            raise Unreadable(span.file.path, "cannot be unpacked: it is cut short") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise Unreadable(span.file.path, f"cannot be unpacked: {error}") from error
        except OSError as error:
            raise Unreadable(span.file.path, f"cannot be read: {error.strerror}") from error

    def _lines(self, span: Span) -> Iterator[Piece | Malformed | None]:
        assert self.field is not None
        with _open(span.file) as stream:
            if span.start:
                stream.seek(span.start - 1)
                stream.readline()  # the rest of a line that belongs to the span before
            number = 0
            while span.stop is None or stream.tell() < span.stop:
                line = stream.readline()
                if not line:
                    break
                number += 1
                yield None
                line = line.strip().removeprefix(b"" if span.start or number > 1 else _BOM)
                found = self._record(line) if line else Piece("")
                if isinstance(found, str):
                    yield Malformed(span.file, number, found, of_line=True)
                elif found.text:
                    yield found

    def _record(self, line: bytes) -> Piece | str:
        """A record, or what is wrong with it."""
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            return f"is not UTF-8: byte {error.start} of it is {line[error.start]:#04x}"
        except (ValueError, RecursionError) as error:
            return f"is not JSON: {getattr(error, 'msg', error)} at column {getattr(error, 'colno', 1)}"
        if not isinstance(record, dict):
            return f"is {_name(record)}, not an object"
        texts = []
        for field in (self.prompt_field, self.field):
            if field is None:
                texts.append(None)
            elif field not in record:
                return f"has no field {field}; it has {', '.join(record) or 'none'}"[:200]
            elif not isinstance(record[field], str):
                return f"has {_name(record[field])} in field {field}, not a string"
            elif (problem := _no_text(record[field])) is not None:
                return f"has a field {field} that {problem}"
            else:
                texts.append(record[field])
        return Piece(texts[1], prompt=texts[0])

    def _text(self, file: File) -> Iterator[Piece | Malformed | Binary]:
        """A file as one document, in pieces that end with a line; it is read twice if it is long."""
        blocks = _blocks(file)
        begin = [next(blocks, b"")]
        whole = len(begin[0]) < PIECE_BYTES
        if (problem := self._check(file, begin if whole else chain(begin, blocks))) is not None:
            yield problem
            return
        decoder, pending, first = codecs.getincrementaldecoder("utf-8")(), "", True
        for block in begin if whole else _blocks(file):
            if pending:
                head, newline, tail = pending.rpartition("\n")
                yield Piece(head + newline or pending, first=first, last=False)
                pending, first = tail if newline else "", False
            pending += decoder.decode(block)
        if pending:
            yield Piece(pending, first=first)

    def _check(self, file: File, blocks: Iterable[bytes]) -> Malformed | Binary | None:
        """What keeps a file from being text, if anything does."""
        decoder, place, line, before = codecs.getincrementaldecoder("utf-8")(), 0, 1, b""
        for block in chain(blocks, (b"",)):
            if not place and not self.alone and b"\0" in block[:BINARY_PROBE_BYTES]:
                return Binary(file)
            line += before.count(b"\n")
            if (nul := block.find(0)) >= 0:
                line += block.count(b"\n", 0, nul)
                return Malformed(file, line, f"is not text: byte {place + nul} is NUL", of_line=False)
            held = len(decoder.getstate()[0])  # the beginning of a character, from the block before
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += block.count(b"\n", 0, max(0, error.start - held))
                problem = f"is not UTF-8 text: byte {place - held + error.start} is {error.object[error.start]:#04x}"
                return Malformed(file, line, problem, of_line=False)
            place, before = place + len(block), block
        return None


def _blocks(file: File) -> Iterator[bytes]:
    with _open(file) as stream:
        while block := stream.read(PIECE_BYTES):
            yield block


def _open(file: File) -> IO[bytes]:
    return gzip.open(file.path) if file.packed else open(file.path, "rb")  # type: ignore[return-value]


def _no_text(text: str) -> str | None:
    if "\0" in text:
        return "holds NUL"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half a character: {text[error.start]!r}"
    return None


def _name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
