import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from recipes.data import files
from recipes.data.config import DataConfig
from recipes.data.source import Source, load
from tests.recipes.corpora import split
from zoo.checks import ConfigError


def write(root: Path, contents: dict[str, bytes]) -> str:
    """Writes files by their path below `root`."""
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return str(root)


def read(path: str | Path, **fields) -> Source:
    return load(DataConfig(source="text", path=str(path), **fields), 256).sources[0]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, {f"part{number % 3}/{number}.txt": f"text {number}".encode() for number in range(40)})


def test_folder_keeps_every_document_once(folder):
    corpus = read(folder, validation_fraction=0.3)
    train, validation = split(corpus.train), split(corpus.validation)
    assert sorted(train + validation) == sorted(f"text {number}".encode() for number in range(40))
    assert (len(train), len(validation)) == (corpus.train.num_documents, corpus.validation.num_documents)
    assert 4 <= len(validation) <= 20


def test_same_seed_same_corpus(folder):
    first, second = read(folder, seed=3), read(folder, seed=3)
    assert split(first.train) == split(second.train)
    assert split(first.validation) == split(second.validation)


def test_seed_decides_order_and_split(folder):
    sides = [(tuple(split(c.train)), tuple(split(c.validation))) for c in (read(folder, seed=s) for s in range(4))]
    assert len({train for train, _ in sides}) == 4
    assert len({validation for _, validation in sides}) > 1
    assert list(sides[0][0]) != sorted(sides[0][0])


def test_split_is_the_same_on_every_machine(tmp_path):
    """Known values of SHA-256, which no version or platform may change."""
    path = write(tmp_path, {name: name.encode() for name in "abcdef"})
    corpus = read(path, validation_fraction=0.5)
    assert (b"".join(split(corpus.train)), b"".join(split(corpus.validation))) == (b"da", b"fcbe")


def test_more_files_move_no_file_to_the_other_side(folder):
    before = set(split(read(folder, validation_fraction=0.3).validation))
    write(Path(folder), {f"more/{number}": f"more {number}".encode() for number in range(20)})
    after = set(split(read(folder, validation_fraction=0.3).validation))
    assert {document for document in after if document.startswith(b"text")} == before


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_each_side_gets_a_file(folder, fraction):
    corpus = read(folder, validation_fraction=fraction)
    assert min(corpus.train.num_documents, corpus.validation.num_documents) == 1


def test_single_file_gives_its_tail(tmp_path):
    corpus = read(Path(write(tmp_path, {"a.txt": b"0123456789"})) / "a.txt", validation_fraction=0.2)
    assert (split(corpus.train), split(corpus.validation)) == ([b"01234567"], [b"89"])


def test_folder_of_one_file_gives_its_tail(tmp_path):
    corpus = read(write(tmp_path, {"a.txt": b"0123456789", "empty.txt": b""}), validation_fraction=0.2)
    assert (split(corpus.train), split(corpus.validation)) == ([b"01234567"], [b"89"])


@given(
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=2),
    fraction=st.floats(0.01, 0.5),
)
def test_single_file_is_cut_between_characters(tmp_path_factory, text, fraction):
    file = tmp_path_factory.mktemp("single") / "a.txt"
    file.write_bytes(text.encode())
    try:
        corpus = read(file, validation_fraction=fraction)
    except ConfigError:
        assert round(len(text.encode()) * fraction) > len(text.encode()) - len(text[0].encode())
        return
    (train,), (validation,) = split(corpus.train), split(corpus.validation)
    assert train.decode() + validation.decode() == text
    assert min(len(train), len(validation)) > 0


def test_folder_skips_hidden_and_binary_files(tmp_path):
    kept = {"a.txt": b"a", "sub/b.txt": "é".encode()}
    path = write(tmp_path, {**kept, ".hidden": b"h", ".git/config": b"g", "image.png": b"\x89PNG\0", "empty": b""})
    corpus = read(path)
    assert sorted(split(corpus.train) + split(corpus.validation)) == sorted(kept.values())
    assert corpus.told.num_skipped == 1


@pytest.mark.parametrize(
    ("contents", "path", "message"),
    [
        ({}, "missing.txt", r"no such file or folder"),
        ({}, ".", r"holds no text"),
        ({"a.txt": b""}, "a.txt", r"holds no text"),
        ({"sub/a.txt": b""}, "sub", r"holds no text"),
        ({"sub/a.bin": b"\0"}, "sub", r"1 binary files were skipped"),
        ({"a.bin": b"PNG\0"}, "a.bin", r"a\.bin: is not text: byte 3 is NUL"),
        ({"sub/a.txt": b"a", "sub/b.txt": b"b" * 9000 + b"\0"}, "sub", r"b\.txt: is not text: byte 9000 is NUL"),
        ({"sub/a.txt": b"a", "sub/b.txt": b"\xff"}, "sub", r"b\.txt: is not UTF-8 text: byte 0 is 0xff"),
        ({"a.txt": b"a"}, "a.txt", r"single file of 1 bytes"),
    ],
)
def test_errors_name_the_key_and_the_path(tmp_path, contents, path, message):
    write(tmp_path, contents)
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path / path)
    assert str(error.value).startswith(f"data.path={tmp_path / path}")


def test_broken_link_is_an_error(tmp_path):
    os.symlink(tmp_path / "nowhere", tmp_path / "link.txt")
    with pytest.raises(ConfigError, match=r"link\.txt: is not a regular file"):
        read(tmp_path)


@pytest.mark.parametrize("source", ["stdlib", "text"])
def test_bytes_need_a_vocabulary_of_256(source):
    config = DataConfig(source=source, path="books" if source == "text" else None)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=255"):
        load(config, 255)


def test_stdlib_is_real_text():
    (corpus,) = load(DataConfig(), 256).sources
    assert len(corpus.train) > 5e6
    assert len(corpus.validation) > 1e5
    train, validation = set(split(corpus.train)), set(split(corpus.validation))
    assert (Path(sysconfig.get_path("stdlib")) / "dataclasses.py").read_bytes() in train | validation


def test_stdlib_train_and_validation_share_no_file():
    (corpus,) = load(DataConfig(), 256).sources
    train, validation = split(corpus.train), split(corpus.validation)
    assert sorted(train + validation) == sorted(
        content for file in files.stdlib().files if (content := Path(file.path).read_bytes())
    )
    assert (len(train), len(validation)) == (corpus.train.num_documents, corpus.validation.num_documents)


def test_stdlib_leaves_out_packages_and_test_suites():
    folders = {part for file in files.stdlib().files for part in Path(file.name).parts[:-1]}
    assert folders.isdisjoint({"site-packages", "__pycache__", "test", "tests"})
    assert {"json", "asyncio"} <= folders


def test_corpus_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        load(DataConfig(), 256).sources[0].train.store.tokens[0] = 1


def test_synthetic_reads_nothing():
    corpus = load(DataConfig(source="synthetic"), 2)
    assert corpus.sources == ()
    assert str(corpus) == "random tokens"


def test_a_fingerprint_tells_whether_a_run_can_go_on(tmp_path):
    def found(path: str, **fields) -> str:
        return load(DataConfig(source="text", path=path, **fields), 256).fingerprint

    texts = {name: name.encode() * 9 for name in "abcdef"}
    before = found(write(tmp_path / "here", texts))
    assert found(write(tmp_path / "there", texts)) == before
    others = [found(str(tmp_path / "here"), seed=1), found(str(tmp_path / "here"), validation_fraction=0.5)]
    others += [
        found(write(tmp_path / "new", {**texts, **more})) for more in ({"a": b"A" * 9}, {"a": b"aa"}, {"g": b"g"})
    ]
    assert len({before, *others}) == 6
