"""Small corpora for the tests of `recipes.data`."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.documents import Documents, ordered
from recipes.data.source import Corpus, Source
from recipes.data.store import Store, Told
from recipes.data.tokenizer import Bytes

WORDS = "the quick brown fox jumps over the lazy dog and runs away".split()


def documents(*texts: Sequence[int], separator: int = 0, prompts: Sequence[int] = ()) -> Documents:
    """Documents of these tokens, in this order."""
    numbers = [np.asarray(values, np.int64) for values in ([len(text) for text in texts], prompts)]
    tokens = np.array([token for text in texts for token in text], np.int32)
    store = Store(
        tokens=tokens,
        lengths=numbers[0],
        prompts=numbers[1],
        digests=np.arange(len(texts), dtype=np.uint64),
        told=Told(),
    )
    return ordered(store, separator, np.arange(len(texts)))


def counting(size: int) -> Documents:
    """One document of `size` tokens, its separator included, that tell their place, up to 256."""
    return documents([place % 256 for place in range(size - 1)], separator=(size - 1) % 256)


def corpus(train: Documents, validation: Documents) -> Corpus:
    source = Source(name="", weight=1.0, train=train, validation=validation, told=Told())
    return Corpus(sources=(source,), codec=Bytes())


def split(part: Documents) -> list[bytes]:
    """The texts of byte documents."""
    spans = zip(part.starts, part.lengths, strict=True)
    return [part.store.tokens[start : start + length].tobytes() for start, length in spans]


def sentence(number: int, length: int = 9) -> str:
    """Words that differ from number to number."""
    draw = np.random.default_rng(number)
    return " ".join([str(number), *(WORDS[word] for word in draw.integers(len(WORDS), size=length))])


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    """A record a line, packed if the name says so; bytes are a line as they are."""
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def write_tokenizer(path: Path, *special: str, around: str | None = None) -> Path:
    """A tokenizer of words and bytes with these special tokens, of which it puts some `around` a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([sentence(number) for number in range(50)], trainer)
    if around is not None:
        known = [(name, made.token_to_id(name)) for name in special]
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=known)
    made.enable_truncation(5)
    made.enable_padding(length=7)
    made.save(str(path))
    return path
