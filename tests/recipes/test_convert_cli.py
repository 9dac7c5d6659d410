"""`zoo-import`, `zoo-export` and `zoo-eval` as their users meet them."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recipes
import zoo
from recipes.cli import convert, eval as evaluation
from tests import helpers
from tests.recipes.test_cli import zoo_train
from tests.zoo.weights_common import DEEPSEEK, LLAMA, model, rewrite, tensors

TEXT = "the quick brown fox jumps over the lazy dog\n" * 5
BYTES = zoo.config(LLAMA, vocab_size=256)


def command(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *overrides: str) -> int:
    """The exit code of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["zoo", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    zoo.export(model(BYTES), tmp_path / "hf")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_import_and_export_are_inverse_and_say_what_they_did(monkeypatch, folder, capsys):
    assert command(monkeypatch, convert.import_main, f"hf={folder}/hf", f"out={folder}/own") == 0
    assert f"{zoo.count_parameters(BYTES):,} parameters" in capsys.readouterr().out
    assert command(monkeypatch, convert.export_main, f"checkpoint={folder}/own", f"out={folder}/again") == 0
    assert f"written to {folder}/again" in capsys.readouterr().out
    helpers.assert_bit_equal(tensors(folder / "again"), tensors(folder / "hf"))


@pytest.mark.parametrize(
    ("main", "overrides", "message"),
    [
        (convert.import_main, ["hf={0}/hf"], "out=???: has no value"),
        (convert.import_main, ["hf={0}/nothing", "out={0}/own"], "nothing/config.json: cannot be read: No such file"),
        (convert.import_main, ["hf={0}/hf", "out={0}/hf"], "exists already; nothing is overwritten"),
        (convert.import_main, ["hf={0}/hf", "out={0}/text.txt/own"], "own: cannot be made"),
        (convert.import_main, ["hf={0}/hf", "ouT={0}/own"], "did you mean out?"),
        (convert.export_main, ["checkpoint={0}/hf", "out={0}/own"], "config.yaml: cannot be read: No such file"),
        (evaluation.main, ["checkpoint={0}/hf"], "data.source=text needs a file or a folder"),
        (evaluation.main, ["checkpoint={0}/nothing", "data.path={0}/text.txt"], "nothing: is no folder"),
        (evaluation.main, ["checkpoint=a", "data.path=b", "run.json={0}/no/a.json"], "no is not a folder that can be"),
        (evaluation.main, ["checkpoint={0}", "data.path={0}/text.txt"], "needs config.yaml"),
        (evaluation.main, ["checkpoint={0}/hf", "data.path={0}/nothing.txt"], "no such file or folder"),
        (evaluation.main, ["checkpoint={0}/hf", "data=synthetic"], "is no text"),
        (evaluation.main, ["checkpoint={0}/hf", "data.path={0}/text.txt", "split=test"], "split=test: is not one of"),
        (evaluation.main, ["checkpoint={0}/hf", "data.path={0}/text.txt", "sequence_length=0"], "sequence_length=0"),
        (evaluation.main, ["checkpoint={0}/hf", "data.path={0}/text.txt", "temperature=-1"], "must not be negative"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(monkeypatch, folder, capsys, main, overrides, message):
    before = sorted(folder.rglob("*"))
    assert command(monkeypatch, main, *(word.format(folder) for word in overrides)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert sorted(folder.rglob("*")) == before


def test_damaged_weights_are_an_error_that_leaves_nothing(monkeypatch, folder, capsys):
    rewrite(folder / "hf", {"model.norm.weight": None})
    assert command(monkeypatch, convert.import_main, f"hf={folder}/hf", f"out={folder}/own") == 2
    assert "needed and not there: model.norm.weight" in capsys.readouterr().err
    assert not (folder / "own").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mlp_dim: 5", "mlp_dim: 7", "has shape [6, 5], the model needs [6, 7]"),
        ("num_layers: 2", "num_layers: 3", "lacks layers.blocks.2."),
        ("num_layers: 2", "num_layers: 1", "holds layers.blocks.1."),
        ("mlp_dim: 5", "mlp: 5", "no such field"),
        ("format: 1", "format: 99", "has format 99, this version reads format 1"),
        ("family: llama", "family: mamba", "has no family mamba"),
        ("format: 1", "[", "config.yaml: cannot be read"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(monkeypatch, folder, capsys, old, new, message):
    zoo.save(model(BYTES), folder / "own")
    config = folder / "own" / "config.yaml"
    config.write_text(config.read_text().replace(old, new))
    assert command(monkeypatch, convert.export_main, f"checkpoint={folder}/own", f"out={folder}/again") == 2
    assert message in capsys.readouterr().err
    assert not (folder / "again").exists()


def test_no_damaged_file_of_a_checkpoint_gives_other_weights(folder):
    original = jax.tree.leaves(model(BYTES))
    zoo.save(model(BYTES), folder / "own")
    refused, rng = 0, np.random.default_rng(0)
    for file in sorted(file for file in (folder / "own/weights").rglob("*") if file.is_file() and file.stat().st_size):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        for damaged in (bytes(flipped), content[: len(content) // 2]):
            file.write_bytes(damaged)
            try:
                helpers.assert_bit_equal(jax.tree.leaves(zoo.load(folder / "own")), original)
            except zoo.ConfigError:
                refused += 1
        file.write_bytes(content)
    assert refused > 3


def test_orbax_reads_a_checkpoint_like_any_other(folder):
    import orbax.checkpoint.experimental.v1 as ocp

    zoo.save(model(BYTES), folder / "own")
    tree = ocp.load(str(folder / "own" / "weights"))
    expected = model(BYTES).layers.blocks[1].mlp.up_proj.weight
    helpers.assert_bit_equal(tree["layers"]["blocks"]["1"]["mlp"]["up_proj"]["weight"], expected)


def naive_loss(weights: Any, tokens: np.ndarray, length: int) -> float:
    """Mean over all tokens but the first, window by window."""
    losses = []
    for first in range(0, len(tokens) - 1, length):
        window = tokens[first : first + length + 1].astype(np.int32)
        logits = np.asarray(weights(jnp.asarray(window[None, :-1])), np.float64)[0]
        logits -= np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        losses += [-row[token] for row, token in zip(logits, window[1:], strict=True)]
    assert len(losses) == len(tokens) - 1
    return float(np.mean(losses))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_evaluation_counts_every_token_once(batch_size):
    weights = zoo.models.abstract(BYTES)
    weights = helpers.drawn(lambda: weights)
    tokens = np.frombuffer(TEXT.encode(), np.uint8)[:60]
    found = recipes.evaluate(weights, tokens, sequence_length=13, batch_size=batch_size)
    assert found.num_tokens == 59
    assert found.loss == pytest.approx(naive_loss(weights, tokens, 13), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    some = recipes.evaluate(weights, tokens, sequence_length=13, batch_size=1, batches=2)
    assert some.num_tokens == 26


def test_evaluation_of_a_folder_equals_that_of_the_model(monkeypatch, folder, capsys):
    overrides = [f"data.path={folder}/text.txt", "sequence_length=32", "run.compile_cache=null"]
    zoo.save(model(BYTES), folder / "own")
    figures = []
    for kind in ("hf", "own"):
        more = (f"checkpoint={folder}/{kind}", f"run.json={folder}/{kind}.json", "prompt=the", "sample_tokens=5")
        assert command(monkeypatch, evaluation.main, *overrides, *more) == 0
        out = capsys.readouterr().out
        figures.append(json.loads((folder / f"{kind}.json").read_text()))
        assert f"{len(TEXT) - 1:,} tokens" in out
        assert "one token a byte" in out
        assert "\nthe" in out
    assert figures[0] == figures[1]
    expected = recipes.evaluate(zoo.load(folder / "own"), np.frombuffer(TEXT.encode(), np.uint8), sequence_length=32)
    assert figures[0]["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert figures[0]["tokens"] == len(TEXT) - 1


def test_evaluation_reads_the_tokenizer_beside_the_weights(monkeypatch, folder, capsys):
    import tokenizers

    words = {word: number for number, word in enumerate(["?", *sorted(set(TEXT.split()))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    tokenizer.save(str(folder / "hf" / "tokenizer.json"))
    overrides = (f"checkpoint={folder}/hf", f"data.path={folder}/text.txt", "run.compile_cache=null")
    assert command(monkeypatch, evaluation.main, *overrides) == 0
    assert f"{len(TEXT.split()) - 1} tokens" in capsys.readouterr().out
    (folder / "hf" / "tokenizer.json").write_text("{}")
    assert command(monkeypatch, evaluation.main, *overrides) == 2
    assert "tokenizer.json: cannot be read" in capsys.readouterr().err


SMALL = """train.steps=2 train.batch_size=2 train.sequence_length=8 train.validation_batches=0 train.sample_tokens=0
run.compile_cache=null optimizer.schedule=constant""".split()
SIZES = (
    "model.dim=6 model.num_layers=2 model.num_heads=4 model.num_kv_heads=2 model.head_dim=4 model.mlp_dim=5 "
    "model.tied_embeddings=false model.rope.scaling=none model.rope.factor=1.0 model.rope.original_length=0"
).split()


def test_training_starts_from_a_folder(monkeypatch, folder, capsys):
    common = ("model=debug_llama", *SIZES, *SMALL, "data=text", f"data.path={folder}/text.txt")
    code = zoo_train(monkeypatch, *common, f"train.init_from={folder}/hf", f"run.dir={folder}/run")
    assert code == 0, capsys.readouterr().err
    first = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[0])
    other = zoo_train(monkeypatch, *common, f"run.dir={folder}/drawn")
    assert other == 0
    drawn = json.loads((folder / "drawn/metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] != drawn["loss"]
    # Normal weights of deviation one make a loss far above that of a fresh model.
    assert first["loss"] > 1.5 * drawn["loss"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.mlp_dim=7"], "its own: model.mlp_dim=5"),
        (["model.rope.theta=2.0"], "its own: model.rope.theta=10000.0"),
        (["train.freeze=[embeding]"], "did you mean embedding?"),
        (['train.freeze=["*"]'], "leaves nothing to train"),
        (["train.freeze=[3]"], "must be a list of patterns"),
        (["train.freeze=embedding"], "train.freeze=embedding: must be of type"),
    ],
)
def test_weights_and_patterns_that_do_not_fit_are_refused(monkeypatch, folder, capsys, overrides, message):
    common = ("model=debug_llama", *SIZES, *SMALL, "data=text", f"data.path={folder}/text.txt")
    run = (f"train.init_from={folder}/hf", f"run.dir={folder}/run")
    assert zoo_train(monkeypatch, *common, *run, *overrides) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_another_family_is_refused(monkeypatch, folder, capsys):
    zoo.save(model(DEEPSEEK), folder / "own")
    assert zoo_train(monkeypatch, "model=debug_llama", f"train.init_from={folder}/own", f"run.dir={folder}/run") == 2
    assert "needs a DeepSeekConfig, model is a LlamaConfig" in capsys.readouterr().err
