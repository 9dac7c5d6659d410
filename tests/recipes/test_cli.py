"""`zoo-train` as its users meet it: what it writes, how it ends, what it says of a bad configuration."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipes.cli import train as train_cli
from tests.recipes.common import QUICK

TINY = """
model=debug_deepseek model.dim=16 model.num_layers=2 model.num_heads=2 model.query_rank=8 model.kv_rank=8
model.nope_head_dim=4 model.rope_head_dim=4 model.value_head_dim=4 model.mlp_dim=16 model.expert_dim=8
model.num_experts=4 model.router.groups=1 model.router.groups_kept=1
train.steps=3 train.batch_size=2 train.sequence_length=8 train.validation_batches=2 train.sample_tokens=4
""".split()


def zoo_train(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """The exit code of `zoo-train` in this process."""
    monkeypatch.setattr(sys, "argv", ["zoo-train", "run.compile_cache=null", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # so that the launcher's own setting is undone afterwards
    with pytest.raises(SystemExit) as stop:
        train_cli.main()
    return int(stop.value.code or 0)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return f"data.path={path}"


def test_run_writes_metrics_config_and_picture(monkeypatch, tmp_path, text, capsys):
    overrides = (*TINY, "data=text", text, "placement=host", "placement.explain=true")
    overrides += ("placement.activations.moe_gate=device", "train.profile=2", f"run.dir={tmp_path / 'run'}")
    code = zoo_train(monkeypatch, *overrides)
    out = capsys.readouterr().out
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    for row in rows[:3]:
        assert {"loss", "grad_norm", "learning_rate", "tokens_per_s", "step_s", "expert_load"} <= row.keys()
        assert row["tokens_per_s"] == pytest.approx(2 * 8 / row["step_s"])
    assert f"validation loss {rows[3]['validation_loss']:.4f}" in out
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").train.steps == 3
    assert (tmp_path / "run" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "run").glob("events.out.tfevents.*"))) == 1
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1
    assert "step 3/3" in out
    assert "steps      3 of 3, 48 tokens" in out
    decided = [line.split() for line in out.splitlines() if line.startswith("moe_gate")]
    assert ["moe_gate", "1", "device", "placement.activations.moe_gate"] in decided


def test_the_same_seed_gives_the_same_losses_under_every_placement(monkeypatch, tmp_path, text):
    def losses(name: str, *overrides: str) -> list[float]:
        assert zoo_train(monkeypatch, *QUICK, "data=text", text, f"run.dir={tmp_path / name}", *overrides) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    device = losses("device", "placement=device")
    assert losses("host", "placement=host") == device
    assert losses("seed", "placement=device", "train.seed=1") != device


def test_non_finite_loss_stops_the_run_and_says_what_to_try(monkeypatch, tmp_path, text, capsys):
    overrides = (*QUICK, "data=text", text, "optimizer.learning_rate=1e38", "optimizer.schedule=constant")
    code = zoo_train(
        monkeypatch, *overrides, "train.steps=20", "train.tensorboard=false", f"run.dir={tmp_path / 'run'}"
    )
    out = capsys.readouterr().out
    assert code == 1
    assert "at step" in out
    assert "try a lower optimizer.learning_rate" in out


BAD = [
    # overrides, what the message must hold
    ("model.num_layrs=3", ["model.num_layrs=3", "num_layers"]),
    ("model.dim=abc", ["model.dim=abc", "Integer"]),
    ("model.dim=0", ["model.dim=0", "above zero"]),
    ("model=debug_lama", ["model=debug_lama", "did you mean debug_llama"]),
    ("model=null", ["model=null"]),
    ("model.rope=3", ["model.rope=3"]),
    ("model.rope.scaling=yarm", ["model.rope.scaling=yarm", "did you mean yarn"]),
    ("model.rope.original_length=0", ["model.rope.original_length=0", "yarn"]),
    ("model.num_experts=6", ["model.num_experts=6", "groups=4"]),
    ("model.experts_per_token=5", ["model.experts_per_token=5", "4 experts"]),
    ("model.experts_per_token=1", ["model.experts_per_token=1", "model.router.normalize=false"]),
    ("model=debug_llama model.num_kv_heads=3", ["model.num_heads=4", "num_kv_heads=3"]),
    ("placement=hst", ["placement=hst", "did you mean host"]),
    ("placement.default=on", ["placement.default=on", "device, host, remat"]),
    ("placement.activations.moe_gat=host", ["moe_gat", "did you mean moe_gate"]),
    ("placement.activations.moe_gate=offload", ["placement.activations.moe_gate=offload", "host"]),
    ("placement.activations.moe_gate=off", ["placement.activations.moe_gate=off", "device, host, remat"]),
    ("placement.activations.block_input=remat", ["block_input=remat", "device, host"]),
    ("placement.activations.attn_lse=host", ["attn_lse", "name attn_context"]),
    ("placement.layers={5-2:{attn_query:host}}", ["placement.layers=5-2", "2-5"]),
    ("placement.layers={0-99:{attn_query:host}}", ["placement.layers=0-99", "0 to 3"]),
    ("placement.layers={first:{attn_query:host}}", ["placement.layers=first", "last"]),
    ("placement.layers={0:host}", ["placement.layers.0=host"]),
    ("placement.layers=[1]", ["placement.layers"]),
    ("placement.layers={0:{moe_gate:host}}", ["layer 0 has no tag moe_gate"]),
    ("placement.layers={0-1:{attn_query:host},1-2:{attn_query:remat}}", ["layer 1 is also named by 0-1"]),
    ("placement=blog_deepseek model=debug_llama", ["attn_query_latent", "no tag"]),
    ("data=text", ["data.path"]),
    ("data=text data.path=/nowhere/at/all", ["data.path=/nowhere/at/all"]),
    ("data=txt", ["data=txt", "did you mean text"]),
    ("train.steps=0", ["train.steps=0", "above zero"]),
    ("train.steps=1.5", ["train.steps=1.5", "Integer"]),
    ("train.batch_size=-1", ["train.batch_size=-1", "above zero"]),
    ("train.accumulate=3", ["train.accumulate=3", "train.batch_size=8"]),
    ("train.dtype=float8", ["train.dtype=float8", "bfloat16"]),
    ("train.sequence_length=100000000", ["train.sequence_length=100000000", "tokens"]),
    ("train=3", ["train=3"]),
    ("train.profile=12-10", ["train.profile=12-10", "did you mean 10-12"]),
    ("train.profile=1", ["train.profile=1", "step 2"]),
    ("train.stall_factor=1", ["train.stall_factor=1", "above one"]),
    ("train.tensorboard=1", ["train.tensorboard=1", "bool"]),
    ("optimizer.schedule=constant optimizer.decay_fraction=0.1", ["decay_fraction=0.1", "warmup_fraction"]),
    ("optimizer.learning_rate=0", ["optimizer.learning_rate=0", "above zero"]),
    ("optimizer.learning_rate=${nothing}", ["optimizer.learning_rate"]),
    ("experiment=debug", ["experiment=debug", "debug_llama"]),
    ("modl=x", ["modl=x", "did you mean model"]),
    ("nonsense", ["nonsense", "KEY=VALUE"]),
    ("run.dir=", ["run.dir"]),
]


@pytest.mark.parametrize(("overrides", "needles"), BAD, ids=[overrides for overrides, _ in BAD])
def test_bad_configuration_exits_2_with_a_short_message(monkeypatch, tmp_path, capsys, overrides, needles):
    monkeypatch.chdir(tmp_path)
    code = zoo_train(monkeypatch, *overrides.split())
    err = capsys.readouterr().err
    assert code == 2
    for needle in needles:
        assert needle in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 6
    assert not list(tmp_path.iterdir())  # nothing half-written


def test_empty_text_exits_2(monkeypatch, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    assert zoo_train(monkeypatch, "data=text", f"data.path={tmp_path / 'empty.txt'}") == 2
    assert "data.path" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["model.num_layrs=3"], ["train.steps=0"], ["--cfg", "job"]], ids=lambda words: words[0]
)
def test_help_and_plain_errors_do_not_import_jax(arguments):
    probe = (
        "import sys; from recipes.cli.train import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'jax' not in sys.modules, 'jax was imported'"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_interrupt_ends_cleanly(tmp_path, text):
    command = [sys.executable, "-m", "recipes.cli.train", *QUICK, "data=text", text, "train.steps=1000000"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [*command, "run.compile_cache=null", f"run.dir={tmp_path / 'run'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size > 0) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "stopped after" in out
    assert "Traceback" not in err
    assert (tmp_path / "run" / "metrics.png").exists()
    assert all(json.loads(line)["step"] for line in log.read_text().splitlines())
