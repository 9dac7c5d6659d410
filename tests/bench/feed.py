"""Tokens a second from files to the device, and the memory of a large source.

python -m tests.bench.feed             bytes and a tokenizer of 4,096 tokens, by 0, 1 and 2 readers
python -m tests.bench.feed memory 1    peak memory with 1 GB of JSON lines, tokenised as bytes and then from the cache
"""

import json
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.batches import train_batches
from recipes.data.config import DataConfig
from recipes.data.feed import ahead, rows
from recipes.data.source import Corpus, load

CONSUMED = 9_000  # tokens a second of `make train` on 2 cores, as the README shows it
BATCH, LENGTH, VOCABULARY = 8, 256, 4096  # the batch of `make train`


def pieces() -> Iterator[str]:
    """The standard library in pieces of 1,500 characters."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(errors="replace").replace("\0", "")
        yield from (text[start : start + 1500] for start in range(0, len(text), 1500))


def write_jsonl(path: Path, num_bytes: int) -> None:
    """Different records until so many bytes are written."""
    texts, written = list(pieces()), 0
    with path.open("w") as file:
        for number in range(sys.maxsize):
            written += file.write(json.dumps({"id": number, "text": f"{number} {texts[number % len(texts)]}"}) + "\n")
            if written >= num_bytes:
                return


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    made.train_from_iterator(
        pieces(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.save(str(path))


def opened(config: DataConfig) -> tuple[Corpus, float]:
    start = time.perf_counter()
    return load(config, VOCABULARY), time.perf_counter() - start


def tokens(corpus: Corpus) -> int:
    return sum(len(part) for source in corpus.sources for part in (source.train, source.validation))


def fed(config: DataConfig, corpus: Corpus, steps: int) -> tuple[float, float]:
    """Seconds to the first batch on the device, and tokens a second from there on."""
    import jax

    batches = train_batches(config, corpus, sequence_length=LENGTH, vocab_size=VOCABULARY)
    start = time.perf_counter()
    with (
        rows(batches, 0, steps + 1, BATCH, np.arange(BATCH), config.readers) as read,
        ahead(read, jax.device_put) as on,
    ):
        jax.block_until_ready(next(on))
        begun = time.perf_counter()
        for batch in on:
            jax.block_until_ready(batch)
        return begun - start, steps * BATCH * LENGTH / (time.perf_counter() - begun)


def show(label: str, rate: float, more: str = "") -> None:
    print(f"{label:44} {rate:12,.0f} tokens/s {rate / CONSUMED:8,.0f} x what make train consumes{more}", flush=True)


def speeds(root: Path) -> None:
    write_jsonl(root / "records.jsonl", 40_000_000)
    write_tokenizer(root / "tokenizer.json")
    records = {"source": "jsonl", "path": str(root / "records.jsonl")}
    cases: dict[str, dict[str, Any]] = {
        "stdlib, bytes": {},
        "JSON lines, bytes": records,
        "JSON lines, tokenizer.json": {**records, "tokenizer": str(root / "tokenizer.json")},
    }
    for label, fields in cases.items():
        for readers in (0, 1, 2):
            config = DataConfig(**fields, cache=str(root / str(readers)), readers=readers, document_mask=True)
            name = f"{label}, {readers} readers"
            corpus, cold_s = opened(config)
            if fields:
                show(f"{name}: tokenising", tokens(corpus) / cold_s)
                corpus, warm_s = opened(config)
                print(f"{name}: opened from the cache in {warm_s:.2f} s")
            first_s, rate = fed(config, corpus, 2000)
            show(f"{name}: batches", rate, f"; the first after {first_s:.1f} s")


def memory(root: Path, gigabytes: float) -> None:
    """In processes of their own: first cold, then from the cache."""
    write_jsonl(root / "records.jsonl", round(gigabytes * 1e9))
    for label in ("tokenised", "from the cache"):
        subprocess.run([sys.executable, "-m", "tests.bench.feed", "peak", str(root), label], check=True)


def peak(root: Path, label: str) -> None:
    """Opens the records and reads batches; says the most memory that took, mapped pages of the files included."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = DataConfig(source="jsonl", path=str(root / "records.jsonl"), cache=str(root / "cache"))
    corpus, seconds = opened(config)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = train_batches(config, corpus, sequence_length=LENGTH, vocab_size=VOCABULARY)
    for number in range(1000):
        batches.batch(number * BATCH, BATCH)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous = int(status["RssAnon"].split()[0])
    print(
        f"{label} in {seconds:.1f} s: {corpus}; peak {after / 1e3:.0f} MB of memory, {before / 1e3:.0f} MB of which "
        f"before; after 1,000 batches {anonymous / 1e3:.0f} MB besides mapped files",
        flush=True,
    )


if __name__ == "__main__":
    what, *rest = [*sys.argv[1:], ""] if len(sys.argv) < 3 else sys.argv[1:]
    if what == "peak":
        peak(Path(rest[0]), rest[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            memory(Path(folder), float(rest[0] or 1)) if what == "memory" else speeds(Path(folder))
