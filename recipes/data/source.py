"""Tokens to train on and tokens to validate on."""

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from recipes.data import cache, files
from recipes.data.config import DataConfig, Part
from recipes.data.documents import Documents, divided, ordered
from recipes.data.records import Reader
from recipes.data.store import Store, Told
from recipes.data.tokenizer import TOKENIZER, Codec, open_codec, require_room, require_separator
from zoo.checks import ConfigError
from zoo.folders import BESIDE, Remote, at


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """One source: what to train on, what to validate on, and what was met while it was read."""

    name: str
    weight: float
    train: Documents
    validation: Documents
    told: Told


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """The sources of a run, none if its data are `synthetic`; `codec` is from text to their tokens and back."""

    sources: tuple[Source, ...]
    codec: Codec

    @property
    def tokenizer_file(self) -> Path | None:
        """What belongs beside the weights of a model that is trained on these tokens; None if they are bytes."""
        return self.codec.file

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two that hold the same documents in the same tokens: a run that goes on needs that."""
        digest = hashlib.sha256(self.codec.fingerprint.encode())
        for source in self.sources:
            for part in (source.train, source.validation):
                digest.update(f"{source.name} {source.weight} {part.separator}".encode())
                for array in (part.starts, part.lengths, part.prompts, part.store.digests):
                    digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()[:32]

    def __str__(self) -> str:
        if not self.sources:
            return "random tokens"
        return "\n".join(_describe(source, self.codec, len(self.sources) > 1) for source in self.sources)


def load(config: DataConfig, vocab_size: int) -> Corpus:
    """Opens the sources, holds some documents out for validation and puts the others in an order that the seed decides.

    A document is a file of text or a record of JSON lines. Whether one is held out depends on the seed and its path
    below what was asked for, or its text if it is a record, only; save that each side gets at least one, and a single
    document gives its tail. Tokenises what was not yet.

    Raises ConfigError if `vocab_size` has no room for the tokens, a source holds no text (see `files`) or more than
    `max_malformed` records of one cannot be read.
    """
    codec = open_codec(config.tokenizer, config.separator)
    if config.source == "synthetic":
        return Corpus(sources=(), codec=codec)
    require_room(codec, vocab_size)
    require_separator(codec)
    if config.source == "mix" and not config.mix:
        raise ConfigError("data.mix", "{}", "names no source", hint="data.mix={books:{path:FILE,weight:1},...}")
    parts = config.mix or {"": Part(path=config.path, source=config.source)}
    apart = None
    if config.validation_path is not None:
        kind = None if config.source == "mix" else config.source
        apart = _store(config, "data.validation_path", Part(path=config.validation_path, source=kind), codec)
    sources = [_source(config, name, part, codec, apart) for name, part in parts.items()]
    return Corpus(sources=tuple(sources), codec=codec)


def with_tokenizer_of(weights: str | None, config: DataConfig) -> DataConfig:
    """The configuration with the tokenizer beside the weights of a folder, unless it names one."""
    if weights is None or config.tokenizer is not None or config.source == "synthetic":
        return config
    folder = at(weights)
    if isinstance(folder, Remote):
        found = _fetched(folder / BESIDE / TOKENIZER, Path(config.cache).expanduser())
    else:
        places = (folder / below / TOKENIZER for below in (".", BESIDE))
        found = next((place for place in places if place.is_file()), None)
    return config if found is None else dataclasses.replace(config, tokenizer=str(found))


def _fetched(file: Remote, cache: Path) -> Path | None:
    """A file of an object store, as one below `cache`, named after what is in it; None if there is none."""
    try:
        if not file.exists():
            return None
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError("folder", file, f"cannot be read: {error.strerror}") from error
    local = cache / f"{hashlib.sha256(content).hexdigest()[:16]}-{file.name}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = local.with_name(f".{local.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(local)
    except OSError as error:
        raise ConfigError("data.cache", cache, f"cannot be written: {error.strerror}") from error
    return local


def everything(config: DataConfig, codec: Codec) -> Documents:
    """All documents of a source that is no mixture, in the order of their paths and lines.

    Raises ConfigError as `load` does, though one document needs no token that ends it.
    """
    store = _store(config, "data.path", Part(path=config.path, source=config.source), codec)
    separator = require_separator(codec) if len(store.lengths) > 1 else codec.separator or 0
    return ordered(store, separator, np.arange(len(store.lengths)))


def _source(config: DataConfig, name: str, part: Part, codec: Codec, apart: Store | None) -> Source:
    """One source; what it holds out, unless there are documents `apart` for that."""
    key = f"data.mix.{name}.path" if name else "data.path"
    store, separator = _store(config, key, part, codec), codec.separator or 0
    if apart is not None:
        train, validation = (_all(config.seed, each, separator) for each in (store, apart))
    elif len(store.lengths) == 1:
        cut = _cut(store, codec, config, key)
        train, validation = divided(store, separator, cut)
    else:
        train, validation = (ordered(store, separator, each) for each in _split(config, store))
    return Source(name=name, weight=part.weight, train=train, validation=validation, told=store.told)


def _store(config: DataConfig, key: str, part: Part, codec: Codec) -> Store:
    """The documents of a source, tokenised."""
    kind = part.source or files.kind(part.path or "")
    found = files.stdlib() if kind == "stdlib" else files.find(key, part.path or "", kind)
    reader = Reader(alone=found.alone)
    if kind == "jsonl":
        reader = Reader(part.field or config.field, part.prompt_field or config.prompt_field)
    return cache.documents(found, reader, codec, cache=config.cache, readers=config.readers, most=config.max_malformed)


def _all(seed: int, store: Store, separator: int) -> Documents:
    return ordered(store, separator, np.argsort(_uniform(seed, store), kind="stable"))


def _split(config: DataConfig, store: Store) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " validation"]]:
    """Orders documents by a hash that is uniform in [0, 1) and holds out those below the validation fraction."""
    hashes = _uniform(config.seed, store)
    order = np.argsort(hashes, kind="stable")  # equal records keep the order of the files
    below = int(np.count_nonzero(hashes < config.validation_fraction))
    num_validation = min(max(below, 1), len(order) - 1)
    return order[num_validation:], order[:num_validation]


def _uniform(seed: int, store: Store) -> Float64[np.ndarray, " documents"]:
    """A number in [0, 1) for each document, drawn from its name, or its digest if it has none."""
    if store.told.names:
        digests = (hashlib.sha256(b"%d/%s" % (seed, os.fsencode(name))).digest() for name in store.told.names)
        return np.array([int.from_bytes(digest[:8]) / 2**64 for digest in digests])
    salt = int.from_bytes(hashlib.sha256(b"%d" % seed).digest()[:8])
    return _mixed(np.asarray(store.digests) ^ np.uint64(salt)) / 2.0**64


def _mixed(x: UInt64[np.ndarray, " documents"]) -> UInt64[np.ndarray, " documents"]:
    """SplitMix64's finaliser, which spreads a change of one bit over all (Steele et al., OOPSLA 2014, figure 17)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _cut(store: Store, codec: Codec, config: DataConfig, key: str) -> int:
    """Where the tail of a single document begins: of bytes, with a whole character."""
    length, unit = int(store.lengths[0]), "bytes" if codec.file is None else "tokens"
    cut = length - max(1, round(length * config.validation_fraction))
    while cut > 0 and unit == "bytes" and int(store.tokens[cut]) & 0xC0 == 0x80:
        cut -= 1
    if cut <= 0:
        problem = f"is a single file of {length} {unit}, too short to hold out data.validation_fraction of it"
        raise ConfigError(key, config.path, problem)
    return cut


def _describe(source: Source, codec: Codec, mixed: bool) -> str:
    told, train, validation = source.told, len(source.train), len(source.validation)
    if codec.file is None:
        sizes = f"{train / 1e6:.1f} MB to train on", f"{validation / 1e6:.1f} MB held out"
    else:
        sizes = f"{train / 1e6:.1f} M tokens to train on", f"{validation / 1e6:.1f} M held out"
    counted = f"{source.train.num_documents} files"
    if not told.names:
        counted = f"{source.train.num_documents:,} records of {told.num_files} files"
    words = [f"{sizes[0]} in {counted}", sizes[1]]
    if told.num_skipped:
        words.append(f"{told.num_skipped} {'binary' if told.names else 'other'} files skipped")
    if told.num_malformed:
        words.append(f"{told.num_malformed} malformed records skipped, the first {': '.join(told.malformed[0])}")
    return (f"{source.name} ({source.weight:g}): " if mixed else "") + ", ".join(words)
