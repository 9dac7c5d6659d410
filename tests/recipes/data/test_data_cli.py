"""`zoo-train` and `zoo-eval` on records, tokenizers and mixtures."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.cli import eval as evaluation, train
from tests.recipes.common import QUICK
from tests.recipes.corpora import sentence, write_jsonl, write_tokenizer


def command(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *overrides: str) -> int:
    """The exit code of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["zoo", "run.compile_cache=null", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture(autouse=True)
def compiled_fast() -> Iterator[None]:
    """What runs a few steps need not run well."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat = [{"prompt": f"Say {number}.", "text": sentence(number)} for number in range(80)]
    write_jsonl(tmp_path / "chat.jsonl", chat)
    (tmp_path / "books").mkdir()
    for number in range(9):
        (tmp_path / "books" / f"{number}.txt").write_text("\n".join(map(sentence, range(number, number + 20))))
    write_tokenizer(tmp_path / "tokenizer.json", "<s>", "</s>", around="<s> $A </s>")
    return tmp_path


def losses(folder: Path) -> list[float]:
    rows = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_a_supervised_mixture_trains_with_a_tokenizer(monkeypatch, folder, capsys):
    """With a mixture given on the command line, a weight of it apart."""
    books, chat = (
        f"books:{{path:{folder}/books/*.txt,weight:1}}",
        f"chat:{{path:{folder}/chat.jsonl,prompt_field:prompt}}",
    )
    overrides = [*QUICK, "model.vocab_size=400", "data=mix", f"data.mix={{{books},{chat}}}", "data.mix.chat.weight=2"]
    overrides += [f"data.tokenizer={folder}/tokenizer.json", "data.document_mask=true", "train.sample_tokens=4"]
    overrides += ["train.sequence_length=40", "model.num_layers=1", "verify=false"]
    assert command(monkeypatch, train.main, *overrides, f"run.dir={folder}/first") == 0
    out = capsys.readouterr().out
    assert "books (1): 0.0 M tokens to train on in " in out
    assert "chat (2): 0.0 M tokens to train on in " in out
    assert "sample, going on from the held-out text at |:" in out
    assert len(losses(folder / "first")) == 3


def test_evaluation_reads_records_and_their_prompts(monkeypatch, folder, capsys):
    import jax

    import zoo

    weights = zoo.build("debug_llama", key=jax.random.key(0), dim=16, num_layers=1, num_heads=2, num_kv_heads=1)
    zoo.save(weights, folder / "weights")
    overrides = [f"checkpoint={folder}/weights", "data=jsonl", f"data.path={folder}/chat.jsonl", "sequence_length=64"]
    figures = []
    for number, more in enumerate([("data.prompt_field=prompt",), ("split=train", "batches=2")]):
        assert command(monkeypatch, evaluation.main, *overrides, *more, f"run.json={folder}/{number}.json") == 0
        figures.append(json.loads((folder / f"{number}.json").read_text())["tokens"])
    texts = sum(len(sentence(number)) + 1 for number in range(80))
    assert figures == [texts - 1, 2 * 4 * 64]  # of the last text the end is left out
    assert command(monkeypatch, evaluation.main, *overrides, "data.field=words") == 2
    assert "chat.jsonl: line 1 has no field words; it has prompt, text" in capsys.readouterr().err


def test_what_cannot_be_read_ends_with_exit_code_2(monkeypatch, folder, capsys):
    write_jsonl(folder / "bad.jsonl", [{"text": "a"}, b"{"])
    run = f"run.dir={folder}/run"
    assert command(monkeypatch, train.main, "data=jsonl", f"data.path={folder}/bad.jsonl", run) == 2
    assert "bad.jsonl: line 2 is not JSON" in capsys.readouterr().err
    tokenizer = f"data.tokenizer={folder}/tokenizer.json"
    assert command(monkeypatch, train.main, "data=jsonl", f"data.path={folder}/chat.jsonl", tokenizer, run) == 2
    assert "model.vocab_size=256: " in capsys.readouterr().err
    assert not (folder / "run").exists()
