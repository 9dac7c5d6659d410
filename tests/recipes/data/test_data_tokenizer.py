"""Bytes and `tokenizer.json`: what documents become, which token ends one, what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from recipes.data import records
from recipes.data.config import DataConfig
from recipes.data.source import Source, load, with_tokenizer_of
from recipes.data.tokenizer import END_OF_TEXT, Bytes, Tokenizer, open_codec
from tests.recipes.corpora import sentence, write_jsonl, write_tokenizer
from zoo.checks import ConfigError

SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json", *SPECIAL, around="<|begin_of_text|> $A <|end_of_text|>")


def read(path: Path, tokenizer: Path, vocab_size: int = 400, **fields) -> Source:
    config = DataConfig(source="jsonl", path=str(path), tokenizer=str(tokenizer), **fields)
    return load(config, vocab_size).sources[0]


def size_of(file: Path) -> int:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(file)).get_vocab_size()


def test_documents_are_what_the_library_makes_of_each(tmp_path, file):
    """Whatever limits the file has: those are of another use. The stream has one end after each document."""
    import tokenizers

    theirs = tokenizers.Tokenizer.from_file(str(file))
    theirs.no_truncation()
    theirs.no_padding()
    texts = [sentence(number, 30) for number in range(20)]
    source = read(write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts]), file)
    stream = [source.train[np.arange(len(source.train))], source.validation[np.arange(len(source.validation))]]
    found = np.split(np.concatenate(stream), np.flatnonzero(np.concatenate(stream) == 1) + 1)
    expected = [theirs.encode(text).ids for text in texts]
    assert sorted(document.tolist() for document in found if len(document)) == sorted(expected)
    assert source.train.store.tokens.dtype == np.uint16


def test_bytes_of_records_are_those_of_their_texts(tmp_path):
    source = load(DataConfig(source="jsonl", path=str(write_jsonl(tmp_path / "a.jsonl", [{"text": "é!"}] * 2))), 256)
    np.testing.assert_array_equal(source.sources[0].train[np.arange(4)], [0xC3, 0xA9, 0x21, 0])


def test_decode_undoes_encode(file):
    codec = open_codec(str(file))
    (tokens,) = codec.encode(["a quick é\nfox 日本"])
    assert codec.decode(tokens) == "a quick é\nfox 日本"
    assert (codec.prefix, codec.separator, codec.vocabulary) == ((0,), 1, size_of(file))


def test_a_text_in_pieces_has_one_beginning(tmp_path, file, monkeypatch):
    text = "".join(f"{sentence(number)}\n" for number in range(40))
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig(source="text", path=str(tmp_path / "a.txt"), tokenizer=str(file))
    whole = load(config, 400).sources[0]
    monkeypatch.setattr(records, "PIECE_BYTES", 100)
    pieces = load(config, 400).sources[0]
    for name in ("tokens", "lengths", "digests"):
        np.testing.assert_array_equal(getattr(pieces.train.store, name), getattr(whole.train.store, name))
    assert np.count_nonzero(whole.train.store.tokens == 0) == 1


@pytest.mark.parametrize("name", END_OF_TEXT)
def test_the_end_of_a_document_is_found_by_its_name(tmp_path, name):
    codec = Tokenizer(write_tokenizer(tmp_path / "tokenizer.json", "<pad>", name))
    assert (codec.separator, codec.prefix) == (1, ())


def test_the_end_of_a_document_must_be_known(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": sentence(number)} for number in range(5)])
    for special in (("<pad>", "<|im_end|>"), ("<eos>", "</s>")):
        tokenizer = write_tokenizer(tmp_path / "tokenizer.json", *special)
        with pytest.raises(ConfigError, match=r"data\.separator=None: .*name one(.|\n)*" + ", ".join(special[::1])):
            read(path, tokenizer)
        assert read(path, tokenizer, separator=special[1]).train.separator == 1
        with pytest.raises(ConfigError, match=r"data\.separator=<im_end>: is no token of"):
            read(path, tokenizer, separator="<im_end>")
    with pytest.raises(ConfigError, match="it has no special tokens"):
        read(path, write_tokenizer(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="bytes are separated by NUL"):
        load(DataConfig(separator="</s>"), 256)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", json.dumps({"model": {"type": "BPE"}}).encode()])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*tokenizer\.json: cannot be read: "):
        open_codec(str(tmp_path / "tokenizer.json"))


def test_more_tokens_than_the_model_has_are_refused(tmp_path, file):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": sentence(number)} for number in range(5)])
    size = size_of(file)
    assert len(read(path, file, size).train) > 0
    with pytest.raises(ConfigError, match=rf"model\.vocab_size={size - 1}: .*tokenizer\.json has {size} tokens"):
        read(path, file, size - 1)


def test_weights_bring_their_tokenizer(tmp_path, file):
    (tmp_path / "checkpoint" / "huggingface").mkdir(parents=True)
    beside = Path(shutil.copy(file, tmp_path / "checkpoint" / "huggingface"))
    weights, config = str(tmp_path / "checkpoint"), DataConfig()
    assert with_tokenizer_of(weights, config).tokenizer == str(beside)
    assert with_tokenizer_of(str(tmp_path), config).tokenizer == str(file)
    for other in (DataConfig(tokenizer="bytes"), DataConfig(source="synthetic")):
        assert with_tokenizer_of(weights, other) is other
    assert with_tokenizer_of(None, config) is with_tokenizer_of("/nowhere", config) is config
    assert isinstance(open_codec("bytes"), Bytes)
