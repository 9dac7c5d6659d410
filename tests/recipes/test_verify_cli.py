"""`zoo-verify` as its users meet it, and what `zoo-train` checks before its first step."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes.cli import train as train_cli, verify as verify_cli
from recipes.placement.segments import replace_places
from recipes.setup import Setup
from recipes.verify import Gradients, check_versions, compare
from recipes.verify.start import misplaced
from tests.recipes.test_cli import QUICK

MODEL = [word for word in QUICK if word.startswith("model")]
SMALL = [*MODEL, "train.batch_size=2", "train.sequence_length=8", "run.compile_cache=null"]


def command(monkeypatch: pytest.MonkeyPatch, main: Any, *overrides: str) -> int:
    """The exit code of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["command", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def bad_compiler(platform: str, hosted: bool, accept: str | None = None) -> Any:
    return check_versions("cuda", hosted, accept, version=(0, 11, 0))


def test_a_placement_is_proved_with_a_target_that_is_not_there(monkeypatch, tmp_path: Path, capsys):
    file, fast = tmp_path / "proof.json", {"xla_backend_optimization_level": 0}
    monkeypatch.setattr("recipes.step.train.compiler_options", lambda platform: fast)  # of the one that runs here
    overrides = (*SMALL, "placement=host", "target=h200", "steps=1", f"run.json={file}", "run.dir=unused")
    assert command(monkeypatch, verify_cli.main, *overrides) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "proved: 18 of 18 placements, gradients equal (worst 0.0)"
    assert max(map(len, lines)) <= 100
    proof = json.loads(file.read_text())
    assert proof.keys() == {"ok", "versions", "trace", "compiled", "gradients"}
    assert (proof["trace"]["asked"], proof["trace"]["found"]) == (18, 18)
    assert proof["compiled"]["host_temp_bytes"] == proof["trace"]["bytes"]["host"] > 0
    assert (proof["gradients"]["worst"], proof["gradients"]["worst_leaf"]) == (0.0, "")
    assert proof["trace"]["untagged_bytes"] > 0
    assert not Path("unused").exists()


def test_what_fails_stands_first_and_in_the_last_line(monkeypatch, capsys):
    monkeypatch.setattr("recipes.verify.proof.check_versions", bad_compiler)
    assert command(monkeypatch, verify_cli.main, *SMALL, "placement=host", "gradients=false") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAILED: versions"
    assert lines[-1] == "failed: this compiler is known to give wrong gradients"
    accepted = (*SMALL, "placement=host", "gradients=false", "accept=wrong_gradients")
    assert command(monkeypatch, verify_cli.main, *accepted) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "proved: 18 of 18 placements, gradients not checked"


def test_a_cell_without_effect_is_no_proof(monkeypatch, capsys):
    asked = ("placement.activations.attn_out=host", "model.num_layers=1", "placement.layers={0:{block_input:remat}}")
    assert command(monkeypatch, verify_cli.main, *SMALL, *asked) == 1
    assert capsys.readouterr().out.startswith("failed: placement.layers.0.block_input=remat: ")


# Bad input -> what is said of it.
BAD = {
    "layers=0": "layers=0: must be above zero",
    "target=h2000": "target=h2000: no such choice",
    "accept=nothing": "accept=nothing: is not one of the allowed words",
    "placement.activations.mlp_gaet=host": "did you mean mlp_gate?",
    "layers=9": "layers=9: must be between 1 and 2",
    "run.json=no/such/folder/a.json": "no/such/folder is not a folder that can be written",
    "mesh.fsdp=64": "batch",
}


@pytest.mark.parametrize(("override", "said"), BAD.items(), ids=BAD)
def test_bad_input(monkeypatch, capsys, override: str, said: str):
    assert command(monkeypatch, verify_cli.main, *SMALL, override) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""


def test_errors_of_the_configuration_come_without_jax():
    code = (
        "import sys\nfrom recipes.cli.verify import main\n"
        "try:\n    main()\nfinally:\n    assert 'jax' not in sys.modules, 'jax was imported'\n"
    )
    words = [sys.executable, "-c", code, "sequence=none"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("zoo-verify: sequence=none: ")


def training(tmp_path: Path, *overrides: str) -> tuple[str, ...]:
    return (*QUICK, "data=synthetic", "placement=host", "run.compile_cache=null", f"run.dir={tmp_path}/a", *overrides)


def test_training_with_a_proof_of_a_small_model(monkeypatch, tmp_path: Path, capsys):
    """As few layers as the table has rows; gradients that differ end the run before anything is written."""
    given = []

    def wrong(config: Any, steps: int) -> Gradients:
        given.append((config.model.num_layers, config.train.sequence_length, steps))
        same, other = compare([np.ones(2)], [np.ones(2)]), compare([np.ones(2)], [np.zeros(2)])
        return Gradients(other, same, (same,), 1, 8)

    monkeypatch.setattr("recipes.verify.start.check_gradients", wrong)
    assert command(monkeypatch, train_cli.main, *training(tmp_path, "verify=true")) == 1
    assert given == [(1, 8, 1)]
    assert "the placement changes gradients; verify=trace trains on" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()


def test_training_under_a_compiler_that_gives_wrong_gradients_is_refused(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr("recipes.verify.start.check_versions", bad_compiler)
    assert command(monkeypatch, train_cli.main, *training(tmp_path)) == 1
    assert "openxla/xla/pull/46231" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()


def test_training_stops_where_the_step_does_not_do_as_the_table_says(monkeypatch, tmp_path: Path, capsys):
    """Whatever drops a placement on its way into the step."""
    right = Setup.place

    def place(self: Setup, model: Any) -> Any:
        return replace_places(right(self, model), lambda place: "remat" if place == "host" else place)

    monkeypatch.setattr(Setup, "place", place)
    assert command(monkeypatch, train_cli.main, *training(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "! is computed again: no policy keeps it" in out
    assert "verify=false trains on" in out
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == ""


def test_training_without_a_check():
    """The program is not even looked at."""
    setup: Any = SimpleNamespace(config=SimpleNamespace(verify="false"))
    assert misplaced(setup, program=None) is None
