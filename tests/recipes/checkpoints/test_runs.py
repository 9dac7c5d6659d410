"""Runs of `zoo-train` with checkpoints: how they stop, go on, are refused, and what they look out for."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zoo
from recipes import loop
from recipes.checkpoints import folder as folders
from recipes.checkpoints.save import NotSaved, Saver
from recipes.cli.again import as_before
from recipes.config import TrainConfig
from recipes.guards import Guards
from recipes.record import Record, cut_back
from recipes.stopping import stoppable
from tests.object_store import object_store
from tests.recipes.checkpoints.common import LLAMA, copied
from tests.recipes.test_cli import zoo_train

RUN = [*LLAMA, "train.steps=5", "train.checkpoint_every=2", "train.validation_batches=1", "train.validate_every=3"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[tuple[int, Any, Any, Any]]:
    return [(row["step"], row.get("loss"), row.get("grad_norm"), row.get("validation_loss")) for row in rows(folder)]


class Once:
    """A function that is called once, for all runs of a file: they differ in what it does not depend on."""

    def __init__(self, function: Any):
        self._function, self._result = function, None

    def __call__(self, *args: Any) -> Any:
        self._result = self._result or self._function(*args)
        return self._result


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[Path]:
    """A run that was left alone; the others of this file take its compiled step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_compiled", Once(loop._compiled))
        drawn = Once(loop.Setup.drawn_state)
        patch.setattr(loop.Setup, "drawn_state", lambda self: copied(drawn(self)))
        folder = tmp_path_factory.mktemp("alone")
        assert zoo_train(patch, *RUN, f"run.dir={folder}") == 0
        yield folder


def test_a_run_keeps_its_last_checkpoints_and_the_next_start_says_it_is_done(alone, monkeypatch, capsys):
    assert folders.steps(alone / folders.NAME) == [4, 5]
    assert [row["step"] for row in rows(alone)] == [1, 2, 3, 3, 4, 5, 5]
    before = rows(alone)
    assert zoo_train(monkeypatch, f"run.dir={alone}") == 0
    said = capsys.readouterr().out
    assert "as before: model=debug_llama" in said
    assert f"done already: {alone / folders.NAME / '5'}" in said
    assert rows(alone) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on_from_there(alone, monkeypatch, tmp_path, capsys, number, code):
    def ask(self, row):
        original(self, row)
        if row["step"] == 3:
            signal.raise_signal(number)

    original = loop.Record.step
    with monkeypatch.context() as patch:
        patch.setattr(loop.Record, "step", ask)
        assert zoo_train(patch, *RUN, f"run.dir={tmp_path}") == code
    assert "stopped after 3 steps" in capsys.readouterr().out
    assert folders.steps(tmp_path / folders.NAME) == [2, 3]
    with (tmp_path / "metrics.jsonl").open("a") as log:  # as of a run that died later, in the middle of a line
        log.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')
    assert zoo_train(monkeypatch, f"run.dir={tmp_path}", "train.seed=1") == 0
    said = capsys.readouterr().out
    assert f"goes on from {tmp_path / folders.NAME / '3'}, step 3 of 5\nother than before: train.seed=1 (was 0)" in said
    assert numbers(tmp_path) == numbers(alone)


def test_resume_must_and_never(alone, monkeypatch, tmp_path, capsys):
    assert zoo_train(monkeypatch, *RUN, f"run.dir={tmp_path}", "train.resume=must") == 2
    assert f"train.resume=must: {tmp_path / folders.NAME} holds no checkpoint" in capsys.readouterr().err
    quick = [*RUN, "train.validation_batches=0", f"run.dir={tmp_path}"]
    assert zoo_train(monkeypatch, *quick, "train.steps=1") == 0
    assert zoo_train(monkeypatch, *quick, "train.resume=never") == 0
    assert f"the checkpoints that were there are now in {tmp_path / 'checkpoints.1'}" in capsys.readouterr().out
    assert (folders.steps(tmp_path / "checkpoints.1"), folders.steps(tmp_path / folders.NAME)) == ([1], [4, 5])
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]


def test_another_machine_goes_on_from_a_checkpoint_that_was_copied_into_a_store(alone, monkeypatch, tmp_path, capsys):
    copied, there = alone / folders.NAME / "4", ["train.checkpoint_dir=s3://bucket/run", f"run.dir={tmp_path / 'run'}"]
    with object_store(monkeypatch) as store:
        files = [file for file in copied.rglob("*") if file.is_file()]
        store.objects |= {f"run/4/{file.relative_to(copied)}": file.read_bytes() for file in files}
        store.closed = True
        assert zoo_train(monkeypatch, *RUN, *there) == 2
        refused = "zoo-train: train.checkpoint_dir=s3://bucket/run: cannot be written: PERMISSION_DENIED: AccessDenied"
        assert capsys.readouterr().err.startswith(refused)
        assert list(tmp_path.iterdir()) == []
        store.closed = False
        assert zoo_train(monkeypatch, *RUN, *there) == 0
        assert "goes on from s3://bucket/run/4, step 4 of 5" in capsys.readouterr().out
        assert [name for name in store.below("run/") if "config" in name] == ["run/4/config.yaml", "run/5/config.yaml"]
    assert numbers(tmp_path / "run") == numbers(alone)[-2:]
    assert not (tmp_path / "run" / folders.NAME).exists()
    assert there[0] in as_before([there[1]])


def test_the_log_is_on_disk_before_a_checkpoint_is_there(alone, monkeypatch, tmp_path):
    log, synced = tmp_path / "metrics.jsonl", []

    def fsync(descriptor: int) -> None:
        original(descriptor)
        if log.exists() and os.path.samestat(os.fstat(descriptor), log.stat()):
            synced.append(([row["step"] for row in rows(tmp_path)], folders.steps(tmp_path / folders.NAME)))

    original = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    quick = ["train.steps=2", "train.validation_batches=0", "train.checkpoint_every=2", f"run.dir={tmp_path}"]
    assert zoo_train(monkeypatch, *RUN, *quick) == 0
    assert synced[0] == ([1, 2], [])
    assert synced[-1] == ([1, 2], [2])


def test_another_model_or_a_file_in_the_way_is_refused_and_nothing_changes(alone, monkeypatch, tmp_path, capsys):
    before = sorted(path.stat().st_mtime_ns for path in alone.rglob("*"))
    assert zoo_train(monkeypatch, f"run.dir={alone}", "model.mlp_dim=24") == 2
    assert "is of another model: model.mlp_dim=16, here 24" in capsys.readouterr().err
    assert zoo_train(monkeypatch, f"run.dir={alone}", "optimizer.moment_dtype=bfloat16", "train.steps=6") == 2
    error = capsys.readouterr().err
    assert "is of float32, this run needs bfloat16\ntrain.allow_cast=true converts it\nto go on from step 4" in error
    assert sorted(path.stat().st_mtime_ns for path in alone.rglob("*")) == before
    (tmp_path / folders.NAME).write_text("")
    assert zoo_train(monkeypatch, *RUN, f"run.dir={tmp_path}") == 2
    assert "is not a folder that can be written" in capsys.readouterr().err


def test_a_run_begins_with_the_weights_of_another(alone, monkeypatch, tmp_path):
    """And `zoo.load` reads them."""
    weights = alone / folders.NAME / "5"
    assert zoo_train(monkeypatch, *RUN, f"train.init_from={weights}", "train.steps=1", f"run.dir={tmp_path}") == 0
    first, last = rows(tmp_path)[0], rows(alone)[-2]
    assert (first["step"], first["cursor"], first["learning_rate"]) == (1, 0, rows(alone)[0]["learning_rate"])
    assert first["loss"] != rows(alone)[0]["loss"]
    assert abs(first["loss"] - last["loss"]) < 0.5
    assert zoo.load(weights).embedding.weight.shape == (32, 16)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_said_and_leaves_what_was_there(alone, monkeypatch, tmp_path, capsys):
    saver = Saver(tmp_path / "saved", 2, 0, lambda folder, _: None)
    state = {"step": jax.numpy.zeros(4096)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.checkpoints.save.stored", lambda state: fake(state))
        saver.save(state, 1)  # type: ignore[arg-type]
        saver.wait()
        with full_disk(4096):
            saver.save(state, 2)  # type: ignore[arg-type]
            with pytest.raises(NotSaved, match=r"the checkpoint of step 2 cannot be written: .*File too large"):
                saver.wait()
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["1"]
    with full_disk(16_000):  # of which the log takes the most
        assert zoo_train(monkeypatch, *RUN, "train.checkpoint_every=0", "train.steps=200", f"run.dir={tmp_path}") == 1
    assert f"{tmp_path / 'metrics.jsonl'} cannot be written: File too large" in capsys.readouterr().out


def fake(state: Any) -> Any:
    from recipes.checkpoints.leaves import Spot, Stored

    return Stored({("weights", "a"): Spot(0, None), ("training", "b"): Spot(0, None)}, {})


def test_a_log_is_cut_back_to_a_step(tmp_path):
    log = tmp_path / "metrics.jsonl"
    whole = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": float("nan")}, {"step": 2, "validation_loss": 1.0}]
    log.write_text("".join(json.dumps(row) + "\n" for row in [*whole, {"step": 3, "loss": 0.1 + 0.2}]) + '{"st')
    assert str(cut_back(log, 2)) == str(whole)
    assert str([json.loads(line) for line in log.read_text().splitlines()]) == str(whole)
    assert cut_back(log, 0) == []
    assert log.read_text() == ""


def test_the_best_validation_loss_is_kept_when_a_run_goes_on(tmp_path, capsys):
    for step, loss in ((3, 2.5), (6, 3.0)):
        with Record(str(tmp_path), "", step - 1) as record:
            record.validated({"step": step, "validation_loss": loss})
    assert record.best == (2.5, 3)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")]
    assert said[0].endswith("perplexity 12.182")
    assert said[1].endswith("; best 2.5000 at step 3")


def test_guards_count_bad_steps_and_find_spikes(capsys):
    guards = Guards(TrainConfig(batch_size=4, max_bad_steps=2, spike_factor=5.0))
    norms = [*[1.0, 1.1] * 10, 7.0, np.nan, 1.0, np.inf, np.nan]
    looked = [
        guards.look({"step": i + 1, "loss": 1.0, "grad_norm": norm, "cursor": 4 * i}) for i, norm in enumerate(norms)
    ]
    assert [row["step"] for row in looked if "spike" in row] == [21]
    assert looked[20]["spike"] == pytest.approx(7 / 1.05)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 21: gradient norm 7, 6.7 times the median; sequences 80 to 83 of the run"
    assert said[1].startswith("step 22: loss 1.0, gradient norm nan: no update; sequences 84 to 87")
    verdict = guards.verdict(looked[-1])
    assert verdict is not None
    assert "at step 25, bad steps in a row: 2; " in verdict
    guards.look({"step": 26, "loss": 1.0, "grad_norm": 1.0, "cursor": 100})
    assert guards.verdict(looked[0]) is None


def test_a_second_signal_interrupts_at_once():
    with stoppable() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked(1)
        assert stop.code == 143
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_checkpoints_that_are_kept(tmp_path):
    for step in range(1, 10):
        folders.begin(tmp_path, step)
        folders.commit(tmp_path, step)
    folders.begin(tmp_path, 11)
    assert folders.steps(tmp_path) == list(range(1, 10))
    folders.prune(tmp_path, keep_last=2, keep_every=3)
    folders.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6", "8", "9"]
