"""Records of JSON lines and texts: each document once, each that cannot be read by file and line."""

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from recipes.data import records, tokenise
from recipes.data.config import DataConfig
from recipes.data.source import Source, load
from tests.recipes.corpora import sentence, split, write_jsonl
from zoo.checks import ConfigError


def read(path: Path, **fields) -> Source:
    config = DataConfig(source="jsonl", path=str(path), cache=str(path.parent / "cache"), **fields)
    return load(config, 256).sources[0]


def both(source: Source) -> list[str]:
    return sorted(text.decode() for text in split(source.train) + split(source.validation))


GOOD = [{"text": sentence(number)} for number in range(3)]
MALFORMED = {
    "no JSON": (b'{"text": "a', "is not JSON: Unterminated string"),
    "two records": (b'{"text": "a"} {"text": "b"}', "is not JSON: Extra data at column 15"),
    "endless list": (b"[" * 100_000, "is not JSON"),
    "list": (["text"], "is a list, not an object"),
    "number": (3, "is a number, not an object"),
    "no field": ({"txt": "a", "id": 3}, "has no field text; it has txt, id"),
    "null": ({"text": None}, "has null in field text, not a string"),
    "object": ({"text": {"text": "a"}}, "has an object in field text, not a string"),
    "no UTF-8": (b'{"text": "\xff"}', "is not UTF-8: byte 10 of it is 0xff"),
    "NUL": ({"text": "a\0b"}, "has a field text that holds NUL"),
    "half a character": (b'{"text": "\\ud800"}', r"has a field text that holds half a character: '\ud800'"),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(("record", "problem"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_records_are_named_by_file_and_line(tmp_path, name, record, problem):
    path = write_jsonl(tmp_path / name, [*GOOD, b"", record])
    with pytest.raises(ConfigError) as error:
        read(path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"data.path={path}: line 5 {problem}")
    assert lines[1:] == ["data.max_malformed=N skips up to N such records"]


def test_malformed_records_are_skipped_and_counted_up_to_a_limit(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [record for record, _ in MALFORMED.values()] + GOOD)
    source = read(path, max_malformed=len(MALFORMED))
    assert both(source) == sorted(record["text"] for record in GOOD)
    assert source.told.num_malformed == len(MALFORMED)
    assert source.told.malformed[3] == (str(path), "line 4 is a list, not an object")
    with pytest.raises(ConfigError, match=r"line 11 has a field(.|\n)*10 such records were skipped before it"):
        read(path, max_malformed=10)


def test_lines_are_counted_through_the_parts_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "SHARD_BYTES", 100)
    bad = [{"text": sentence(number)} for number in range(40)] + [{"no": 1}]
    write_jsonl(tmp_path / "a.jsonl", bad[:-1])
    write_jsonl(tmp_path / "b.jsonl", bad)
    with pytest.raises(ConfigError, match=r"b\.jsonl: line 41 has no field text"):
        load(DataConfig(source="jsonl", path=str(tmp_path)), 256)


@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
    size=st.integers(1, 60),
    newline=st.sampled_from(["\n", "\r\n", "\n\n"]),
    last=st.booleans(),
)
def test_every_record_is_read_once_however_a_file_is_cut(tmp_path_factory, texts, size, newline, last):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes((newline.join(lines) + newline * last).encode())
    file = records.File("a.jsonl", str(path), path.stat().st_size, 0)
    reader, cuts = records.Reader(field="text"), [*range(0, file.num_bytes, size), file.num_bytes]
    spans = [records.Span(file, start, stop) for start, stop in pairwise(cuts)]
    found: list[Any] = [each for span in spans for each in reader.read(span)]
    assert [each.text for each in found if each is not None] == [text for text in texts if text]
    assert found.count(None) == path.read_bytes().count(b"\n") + bool(texts and not last)


def test_a_long_text_is_one_document_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "PIECE_BYTES", 50)
    text = "".join(f"{sentence(number)} é\n" for number in range(60)) + "no line is as long as this" * 20
    (tmp_path / "a.txt").write_text(text)
    file = records.File("a.txt", str(tmp_path / "a.txt"), 1, 0)
    found: list[Any] = list(records.Reader().read(records.Span(file)))
    *pieces, last = found
    assert "".join(piece.text for piece in [*pieces, last]) == text
    assert [piece.first for piece in [*pieces, last]] == [True] + [False] * len(pieces)
    assert not any(piece.last for piece in pieces)
    assert last.last
    assert all(piece.text.endswith("\n") for piece in pieces[:50])
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xc3")
    (problem,) = records.Reader().read(records.Span(file))
    assert str(problem) == f"is not UTF-8 text: byte {len(text.encode())} is 0xc3, in line 61"


@pytest.mark.parametrize("cut", [False, True], ids=["no gzip", "cut short"])
def test_damaged_gzip_names_the_file(tmp_path, cut):
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress(b"\n".join(json.dumps(record).encode() for record in GOOD * 100))
    path.write_bytes(packed[: len(packed) // 2] if cut else b'{"text": "a"}')
    with pytest.raises(ConfigError, match=re.escape(f"data.path={path}: cannot be unpacked: ")):
        read(path, max_malformed=5)


def test_packed_and_plain_hold_the_same(tmp_path):
    lines = [{"text": sentence(number)} for number in range(20)]
    plain, packed = (read(write_jsonl(tmp_path / name, lines)) for name in ("a.jsonl", "b.jsonl.gz"))
    assert both(plain) == both(packed) == sorted(line["text"] for line in lines)
    assert split(plain.train) == split(packed.train)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "text" / "b.txt").write_bytes(b"plain")
    (tmp_path / "text" / "c.gz").write_bytes(gzip.compress(b"bin\0ary"))
    config = DataConfig(source="text", path=str(tmp_path / "text"), cache=str(tmp_path / "cache"))
    (source,) = load(config, 256).sources
    assert both(source) == ["packed", "plain"]
    assert source.told.num_skipped == 1


def test_folders_and_globs(tmp_path):
    (tmp_path / "sub").mkdir()
    for number, name in enumerate(["a.jsonl", "sub/b.ndjson", "sub/c.JSONL", ".hidden.jsonl"]):
        write_jsonl(tmp_path / name, [{"text": f"{name} {line}", "id": number} for line in range(3)])
    (tmp_path / "readme.md").write_text("no records")
    whole = read(tmp_path)
    assert len(both(whole)) == 9
    assert whole.told.num_skipped == 1
    assert len(both(read(tmp_path / "sub" / "*.ndjson"))) == 3
    assert both(read(tmp_path / "**" / "[abc].*")) == both(whole)
    with pytest.raises(ConfigError, match="holds no text"):
        read(tmp_path / "*.jsonl.gz")


def test_a_record_is_held_out_by_its_text_alone(tmp_path):
    """Copies stand on one side, and more records or other files move none."""
    lines = [{"text": sentence(number)} for number in range(60)]
    first = read(write_jsonl(tmp_path / "a.jsonl", lines), validation_fraction=0.3)
    more = [*lines[::-1], *lines[:20], *({"text": f"more {number}"} for number in range(30))]
    second = read(write_jsonl(tmp_path / "b.jsonl", more), validation_fraction=0.3)
    held, held_later = set(split(first.validation)), set(split(second.validation))
    assert 8 <= len(held) <= 30
    assert {text for text in held_later if not text.startswith(b"more")} == held
    assert held_later.isdisjoint(split(second.train))
    assert read(tmp_path / "a.jsonl", validation_fraction=0.3, seed=1).validation.num_documents > 0
    assert split(read(tmp_path / "a.jsonl", seed=1).train) != split(read(tmp_path / "a.jsonl").train)


def test_validation_has_a_path_of_its_own(tmp_path):
    train = write_jsonl(tmp_path / "a.jsonl", [{"text": sentence(number)} for number in range(9)])
    held_out = write_jsonl(tmp_path / "b.jsonl", [{"text": "held out"}])
    source = read(train, validation_path=str(held_out))
    assert split(source.validation) == [b"held out"]
    assert source.train.num_documents == 9
    with pytest.raises(ConfigError, match=r"data\.validation_path=/nowhere: no such file"):
        read(train, validation_path="/nowhere")
