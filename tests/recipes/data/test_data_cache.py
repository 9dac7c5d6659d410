"""Token files: made once, whole or not at all, the same by any number of readers; batches as if in memory."""

import json
import multiprocessing
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.data import cache, readers, tokenise
from recipes.data.batches import Batches, train_batches
from recipes.data.config import DataConfig
from recipes.data.source import Corpus, load
from recipes.data.store import META, TOKENS, Store
from recipes.data.tokenizer import open_codec
from tests.recipes.corpora import sentence, write_jsonl, write_tokenizer
from zoo.checks import ConfigError


@pytest.fixture
def records(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"):
        write_jsonl(folder / name, [{"text": f"{name} {sentence(number, 20)}"} for number in range(60)])
    return folder


@pytest.fixture
def config(tmp_path: Path, records: Path) -> DataConfig:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    fields: dict[str, Any] = {"path": str(records), "tokenizer": str(tokenizer), "cache": str(tmp_path / "cache")}
    return DataConfig(source="jsonl", document_mask=True, **fields)


def with_readers(config: DataConfig, readers: int, folder: str) -> DataConfig:
    return DataConfig(**{**vars(config), "readers": readers, "cache": str(Path(config.cache).parent / folder)})


def batches(config: DataConfig, corpus: Corpus) -> Batches:
    return train_batches(config, corpus, sequence_length=32, vocab_size=400)


def assert_same(first: Store, second: Store) -> None:
    assert first.told == second.told
    for name in ("tokens", "lengths", "prompts", "digests"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_tokens_do_not_depend_on_readers_or_on_where_they_are(config, monkeypatch):
    """Two processes, none, and all in memory; files cut into parts of about six records."""
    monkeypatch.setattr(cache, "SMALL_BYTES", {False: 10**9})
    memory = load(DataConfig(**{**vars(config), "path": config.path + "/[ac].*"}), 400)
    monkeypatch.setattr(cache, "SMALL_BYTES", {False: 0})
    monkeypatch.setattr(tokenise, "SHARD_BYTES", 1000)
    alone = load(DataConfig(**{**vars(config), "path": config.path + "/[ac].*"}), 400)
    assert_same(memory.sources[0].train.store, alone.sources[0].train.store)
    assert memory.sources[0].train.store.folder is None
    assert isinstance(alone.sources[0].train.store.tokens, np.memmap)
    first, second = (load(with_readers(config, number, f"cache{number}"), 400) for number in (0, 2))
    assert_same(first.sources[0].train.store, second.sources[0].train.store)
    assert len(first.sources[0].train.store.lengths) == 180
    found = [batches(config, corpus).batch(500, 20) for corpus in (first, second)]
    for name in ("tokens", "segment_ids", "positions"):
        np.testing.assert_array_equal(found[0][name], found[1][name])


def encoded(config: DataConfig) -> list[np.ndarray]:
    """The records of `a.jsonl`, by the tokenizer as it is now."""
    texts = (f"a.jsonl {sentence(number, 20)}" for number in range(60))
    return open_codec(config.tokenizer).encode(list(texts))


def test_what_is_kept_is_read_again_until_something_changes(config, records, capsys):
    def times() -> int:
        load(config, 400)
        return capsys.readouterr().out.count("tokenised in")

    assert [times(), times()] == [1, 0]
    assert len(list(Path(config.cache).iterdir())) == 1  # no lock, nothing half made
    os.utime(records / "a.jsonl", (1, 1))
    assert [times(), times()] == [1, 0]
    write_tokenizer(Path(str(config.tokenizer)), "<pad>", "</s>")
    assert [times(), times()] == [1, 0]
    store = load(config, 400).sources[0].train.store
    assert store.tokens.tolist()[: store.lengths[0]] in [text.tolist() for text in encoded(config)]
    write_jsonl(records / "d.jsonl.gz", [{"text": "more"}])
    assert [times(), times()] == [1, 0]


def damages(folder: Path):
    yield (folder / TOKENS).write_bytes((folder / TOKENS).read_bytes()[:-2])
    yield (folder / TOKENS).unlink()
    yield (folder / META).write_text("{")
    yield (folder / META).write_text(json.dumps({"dtype": "<u2"}))
    yield (folder / "lengths.npy").write_bytes(b"")


def test_what_is_damaged_is_made_again(config, capsys):
    whole = load(config, 400).sources[0].train.store
    assert whole.folder is not None
    expected = np.array(whole.tokens)
    for _ in damages(whole.folder):
        np.testing.assert_array_equal(load(config, 400).sources[0].train.store.tokens, expected)
    assert capsys.readouterr().out.count("tokenised in") == 6


def test_what_a_killed_process_left_is_removed(config):
    made = load(config, 400).sources[0].train.store.folder
    assert made is not None
    left = made.rename(made.parent / f".{made.name}-abc")
    (left / META).unlink()
    load(config, 400)
    assert list(Path(config.cache).iterdir()) == [made]


def test_a_failure_leaves_nothing(config, records, monkeypatch):
    write_jsonl(records / "d.jsonl", [b"nothing"])
    with pytest.raises(ConfigError, match=r"d\.jsonl: line 1 is not JSON"):
        load(config, 400)
    (records / "d.jsonl").unlink()
    monkeypatch.setattr(tokenise.stores, "append", fill_the_disk)
    with pytest.raises(ConfigError, match=r"data\.cache=.*: cannot be written: No space left on device"):
        load(config, 400)
    assert list(Path(config.cache).iterdir()) == []


def fill_the_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_cache_that_cannot_be_is_an_error(config):
    wrong = DataConfig(**{**vars(config), "cache": "/dev/null/cache"})
    with pytest.raises(ConfigError, match=r"data\.cache=/dev/null/cache: cannot be written: Not a directory"):
        load(wrong, 400)


def test_more_malformed_records_are_refused_later_too(config, records):
    write_jsonl(records / "d.jsonl.gz", [b"nothing", b"nothing"])
    lenient = DataConfig(**{**vars(config), "max_malformed": 2})
    assert "2 malformed records skipped, the first" in str(load(lenient, 400))
    with pytest.raises(ConfigError, match=r"d\.jsonl\.gz: line 2 is not JSON(.|\n)*1 such records were skipped"):
        load(DataConfig(**{**vars(config), "max_malformed": 1}), 400)


def test_of_several_that_need_it_one_makes_it(config, capsys):
    with ThreadPoolExecutor(4) as threads:
        stores = [each.sources[0].train.store for each in threads.map(lambda _: load(config, 400), range(4))]
    assert capsys.readouterr().out.count("tokenised in") == 1
    for store in stores[1:]:
        assert_same(stores[0], store)


def test_another_process_maps_the_files_itself(config):
    store = load(config, 400).sources[0].train.store
    assert len(pickle.dumps(store)) < 1000
    assert_same(pickle.loads(pickle.dumps(store)), store)


def test_a_reader_that_is_killed_ends_the_run():
    with (
        pytest.raises(ConfigError, match=r"data\.readers=1: one of these processes was killed"),
        readers.processes(1) as run,
    ):
        list(run(os._exit, [1]))


def sleep_as_reader(queue) -> None:
    readers.prepare_reader()
    queue.put(os.getpid())
    time.sleep(60)


def starts_a_reader(queue) -> None:
    multiprocessing.get_context("spawn").Process(target=sleep_as_reader, args=(queue,)).start()
    time.sleep(60)


def test_readers_end_with_the_process_that_started_them():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    middle = context.Process(target=starts_a_reader, args=(queue,))
    middle.start()
    reader = queue.get(timeout=30)
    middle.kill()
    middle.join()
    for _ in range(100):
        if not Path(f"/proc/{reader}").exists() or "Z" in Path(f"/proc/{reader}/stat").read_text().split()[2]:
            return
        time.sleep(0.1)
    raise AssertionError("the reader lives on")
