"""Several sources in proportion, and supervised records: both pure functions of the position in the run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from recipes.data.batches import Batches, train_batches, validation_batches
from recipes.data.config import DataConfig
from recipes.data.sequences import Whole
from recipes.data.source import load
from tests.recipes.corpora import documents, write_jsonl
from zoo.checks import ConfigError

WEIGHTS = {"a": 5.0, "b": 3.0, "c": 2.0}
KNOWN_START = "ababacabac"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Sources of other lengths; every byte says which it is of."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, size in (("a", 60), ("b", 20), ("c", 200)):
        write_jsonl(folder / f"{name}.jsonl", ({"text": name * 6 + str(number)} for number in range(size)))
    mix = {name: {"path": str(folder / f"{name}.jsonl"), "weight": weight} for name, weight in WEIGHTS.items()}
    return DataConfig(source="mix", mix=mix, validation_fraction=0.2)


def made(config: DataConfig, make=train_batches) -> Batches:
    return make(config, load(config, 256), sequence_length=9, vocab_size=256)


def owners(batches: Batches, cursor: int, size: int) -> list[str]:
    """Whose each sequence is."""
    rows = batches.batch(cursor, size)["tokens"]
    return [next(name for name in WEIGHTS if ord(name) in row) for row in rows]


def test_sources_come_in_proportion(mixture):
    batches = made(mixture)
    found = owners(batches, 0, 10_000)
    for name, weight in WEIGHTS.items():
        assert abs(found.count(name) - 1000 * weight) <= 10 * weight  # 1%
    assert batches.num_sequences is None


def test_the_order_of_sources_is_known(mixture):
    """Grain's rule of mixing, which no version may change: a run that goes on would see other data."""
    assert "".join(owners(made(mixture), 0, 10)) == KNOWN_START


@given(cursor=st.integers(0, 3000), first=st.integers(1, 20), second=st.integers(1, 20))
def test_a_mixture_depends_on_the_position_only(mixture, cursor, first, second):
    batches = made(mixture)
    whole = batches.batch(cursor, first + second)["tokens"]
    parts = [batches.batch(cursor, first)["tokens"], batches.batch(cursor + first, second)["tokens"]]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("cursor", [0, 1, 7, 1234])
def test_each_source_goes_on_from_its_own_cursor(mixture, cursor):
    """Its sequences in the mixture are those that it alone gives, each once."""
    batches = made(mixture)
    cursors, rows, found = batches.cursors(cursor), batches.batch(cursor, 200)["tokens"], owners(batches, cursor, 200)
    assert sum(cursors.values()) == cursor
    for name in WEIGHTS:
        own = batches.sequences.sources[name]  # type: ignore[attr-defined]
        mine = rows[[owner == name for owner in found]]
        expected = own.read(np.arange(cursors[name], cursors[name] + len(mine)))["tokens"]
        np.testing.assert_array_equal(mine, expected)


def test_sources_of_equal_size_have_orders_of_their_own(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefgh"} for _ in range(50)])
    mix = {name: {"path": str(path)} for name in ("a", "b")}
    sources = made(DataConfig(source="mix", mix=mix)).sequences.sources  # type: ignore[attr-defined]
    assert sources["a"].seed != sources["b"].seed


def test_validation_is_in_proportion_until_a_source_would_come_again(mixture):
    batches = made(mixture, validation_batches)
    size = batches.num_sequences
    assert size is not None
    assert size > 5
    assert set(owners(batches, 0, size)) == set(WEIGHTS)
    np.testing.assert_array_equal(batches.batch(size, 5)["tokens"], batches.batch(0, 5)["tokens"])


BAD_MIX = {
    "a word": ({"a": 3}, r"data\.mix\.a=3: needs a map"),
    "no path": ({"a": {"weight": 1}}, r"data\.mix\.a\.path=None: must name"),
    "a path too many": ({"a": {"source": "stdlib", "path": "x"}}, r"data\.mix\.a\.path=x"),
    "no weight": ({"a": {"path": "x", "weight": 0}}, r"data\.mix\.a\.weight=0\.0: must be above zero"),
    "misspelt": ({"a": {"path": "x", "wieght": 1}}, r"data\.mix\.a\.wieght=1: (.|\n)*did you mean weight"),
    "no such kind": ({"a": {"path": "x", "source": "jsnl"}}, r"data\.mix\.a\.source=jsnl(.|\n)*did you mean jsonl"),
    "no such file": ({"a": {"path": "/nowhere"}}, r"data\.mix\.a\.path=/nowhere: no such file"),
    "nothing": ({}, r"data\.mix=\{\}: names no source"),
}


@pytest.mark.parametrize(("mix", "message"), BAD_MIX.values(), ids=BAD_MIX)
def test_a_mixture_that_cannot_be_is_refused(mix, message):
    with pytest.raises(ConfigError, match=message):
        load(DataConfig(source="mix", mix=mix), 256)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8)), min_size=1, max_size=12), length=st.integers(1, 14)
)
def test_records_with_prompts_stay_whole(sizes, length):
    """Each once, from its beginning; learnt are its completion and its end; filling is neither learnt nor attended."""
    texts = [[number + 1] * (prompt + rest) for number, (prompt, rest) in enumerate(sizes)]
    whole = Whole(documents=documents(*texts, prompts=[p for p, _ in sizes]), sequence_length=length, seed=None)
    found = whole.read(np.arange(whole.num_sequences))
    seen = []
    for tokens, ids, positions, learnt in zip(*found.values(), strict=True):
        for segment in range(1, ids[-1] + 1):
            mine = ids == segment
            np.testing.assert_array_equal(positions[mine], np.arange(mine.sum()))
            number = int(tokens[mine][0]) - 1
            if number < 0:
                assert (segment, learnt[mine].any(), tokens[mine].any()) == (ids[-1], False, False)
                continue
            seen.append(number)
            stop = min(len(texts[number]) + 1, length + 1)
            np.testing.assert_array_equal(tokens[mine], [*texts[number], 0][:stop])
            np.testing.assert_array_equal(learnt[mine], np.arange(stop) >= sizes[number][0])
    assert seen == list(range(len(sizes)))


def test_supervised_batches_say_what_is_learnt(tmp_path: Path):
    lines = [{"question": "What is it? ", "answer": "é", "text": "x"} for _ in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    fields: dict[str, Any] = {"path": str(path), "prompt_field": "question", "field": "answer"}
    batches = train_batches(
        config := DataConfig(source="jsonl", **fields), load(config, 256), sequence_length=32, vocab_size=256
    )
    batch = batches.batch(0, 4)
    assert tuple(batch) == config.arrays == ("tokens", "loss_mask")
    row = "What is it? é\0".encode()
    filling = bytes(33 - 2 * len(row))
    np.testing.assert_array_equal(batch["tokens"], [list(row * 2 + filling)] * 4)
    np.testing.assert_array_equal(batch["loss_mask"], [[*([0] * 12 + [1] * 3) * 2, *filling]] * 4)
    mix = {"chat": {**fields}, "books": {"path": str(path), "field": "text"}}
    mixed = DataConfig(source="mix", mix=mix, document_mask=True)
    batch = train_batches(mixed, load(mixed, 256), sequence_length=32, vocab_size=256).batch(0, 10)
    assert tuple(batch) == mixed.arrays == ("tokens", "segment_ids", "positions", "loss_mask")
    assert sorted(set(batch["loss_mask"].sum(axis=1).tolist())) == [6, 33]


def test_records_whose_prompt_fills_a_sequence_are_left_out(tmp_path: Path):
    """A batch of them would have no mean; whatever is drawn, there is something to learn in every sequence."""
    lines = [{"prompt": "p" * length, "text": "a"} for length in range(40)]
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    config = DataConfig(source="jsonl", path=str(path), prompt_field="prompt", validation_path=str(path))
    batches, held_out = made(config), made(config, validation_batches)
    assert batches.notices == ("30 records are left out: their prompts fill a sequence",)
    for each in (batches, held_out):
        assert each.num_sequences is not None
        learnt = each.batch(0, each.num_sequences)["loss_mask"]
        assert learnt[:, 1:].any(axis=1).all()
    write_jsonl(path, [line for line in lines if len(line["prompt"]) > 9])
    with pytest.raises(
        ConfigError, match=r"train\.sequence_length=9: all prompts of the training text fill a sequence"
    ):
        made(config)


def test_a_mixture_is_validated_on_one_path(mixture, tmp_path: Path):
    path = write_jsonl(tmp_path / "held.jsonl", [{"text": "b" * 10}] * 5)
    config = DataConfig(source="mix", mix=mixture.mix, validation_path=str(path))
    batches = made(config, validation_batches)
    assert batches.num_sequences == 6
    assert set(owners(batches, 0, 6)) == {"b"}


def test_a_prompt_that_is_missing_is_malformed(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match="line 1 has no field prompt; it has text"):
        load(DataConfig(source="jsonl", path=str(path), prompt_field="prompt"), 256)
