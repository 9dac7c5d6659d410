"""`zoo-plan` as its users meet it: tables, files, exit codes, what is said of what cannot be planned."""

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipes.cli import plan as plan_cli
from recipes.plan import planned as planning
from recipes.plan.record import Plan, Traffic
from recipes.plan.targets import Target

TINY = """
model=debug_llama model.dim=128 model.num_layers=2 model.num_heads=1 model.num_kv_heads=1 model.head_dim=128
model.mlp_dim=128 train.batch_size=2 train.sequence_length=128 train.dtype=bfloat16
""".split()


def zoo_plan(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """The exit code of `zoo-plan` in this process."""
    monkeypatch.setattr(sys, "argv", ["zoo-plan", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as stop:
        plan_cli.main()
    return int(stop.value.code or 0)


def made(case: Any, *_: Any) -> Plan:
    """A plan whose memory is linear in the batch: 10 GiB and 1 for each sequence; half of that under `host`."""
    size, gib = case.config.train.batch_size, 2**30
    kept = size * gib if case.config.placement.default == "device" else size * gib // 2
    host = size * gib - kept
    return Plan(
        name=case.name,
        target=case.target,
        device_peak_bytes=10 * gib + kept,
        host_bytes=host,
        parts={"moments": 10 * gib, "activations/mlp_gate/0-1": kept, "unexplained": 0},
        host_parts={"activations/mlp_up/0-1": host, "unexplained": 0} if host else {},
        traffic={"mlp_up": Traffic(host, host, 1.0, 1.0)} if host else {},
        flops=1e12,
        forward_s=1.0,
        backward_s=2.0,
        compile_s=1.0,
        places={"mlp_gate": ["device", "device"], "mlp_up": ["host", "-"], "moe_gate": ["", "remat"]},
        batch_size=size,
        num_layers=2,
    )


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without compiling."""
    monkeypatch.setattr(planning, "planned", made)


# The command, and whether it got on without jax, which takes seconds.
WITHOUT_JAX = """
import sys
from recipes.cli.plan import main
try:
    main()
finally:
    assert "jax" not in sys.modules
"""


def test_a_step_is_planned_and_kept(monkeypatch, tmp_path: Path, capsys):
    overrides = [*TINY, "placement=host", "target=h200", f"run.plans={tmp_path}", f"run.json={tmp_path / 'a.json'}"]
    assert zoo_plan(monkeypatch, *overrides) == 0
    (plan,) = json.loads((tmp_path / "a.json").read_text())["plans"]
    assert (plan["name"], plan["target"], plan["devices"], plan["fits"]) == ("host", "h200", 1, True)
    assert sum(plan["parts"].values()) == plan["device_peak_bytes"] < plan["device_capacity_bytes"]
    assert sum(plan["host_parts"].values()) == plan["host_bytes"] > 0
    assert plan["traffic"]["mlp_gate"]["to_host_bytes"] == 2 * 2 * 128 * 128 * 2
    first = capsys.readouterr().out
    assert max(map(len, first.splitlines())) <= 100
    again = subprocess.run([sys.executable, "-c", WITHOUT_JAX, *overrides], capture_output=True, text=True, check=True)
    assert again.stdout == first


def test_a_comparison_in_one_table_and_picture(instant, monkeypatch, tmp_path, capsys):
    files = [f"run.{kind}={tmp_path / 'a'}.{kind}" for kind in ("json", "png", "html")]
    assert zoo_plan(monkeypatch, *TINY, "compare=[device,host]", *files) == 0
    out = capsys.readouterr().out
    assert "1 device" in out
    assert "2 host" in out
    assert [plan["name"] for plan in json.loads((tmp_path / "a.json").read_text())["plans"]] == ["device", "host"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text()
    assert "data:image/svg+xml;base64," in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_nothing_fits_exits_1_with_three_changes(instant, monkeypatch, capsys):
    assert zoo_plan(monkeypatch, *TINY, "placement=device", "train.batch_size=1024") == 1
    out = capsys.readouterr().out
    assert "no: device" in out
    changes = out.partition("what would save most")[2].splitlines()[1:]
    assert [line.split()[0] for line in changes] == ["train.batch_size=512", "train.accumulate=2", "mesh.fsdp=2"]


def test_host_memory_counts_as_well(instant, monkeypatch, capsys):
    """At 480 sequences 240 GiB of the device's 133 and the host's 232 are asked for."""
    assert zoo_plan(monkeypatch, *TINY, "placement=host", "train.batch_size=480") == 1
    out = capsys.readouterr().out
    assert "no: device and host" in out
    assert "placement.activations.mlp_up=remat" in out


@pytest.mark.parametrize(("placement", "batch"), [("device", 123), ("host", 246)])
def test_the_largest_batch(instant, monkeypatch, capsys, placement: str, batch: int):
    """133.38 GiB are usable: 10 and 123, or 10 and half of 246."""
    assert zoo_plan(monkeypatch, *TINY, f"placement={placement}", "plan.maximise=batch") == 0
    out = capsys.readouterr().out
    assert f"largest batch that fits: {batch}" in out


def test_a_search_keeps_what_it_found_before_a_compile_that_fails(monkeypatch, capsys):
    def limited(case: Any, *_: Any) -> Plan:
        if case.config.train.batch_size > 10:
            raise planning.PlanError("the compile took more than 600 s")
        return made(case)

    monkeypatch.setattr(planning, "planned", limited)
    assert zoo_plan(monkeypatch, *TINY, "placement=device", "plan.maximise=batch") == 0
    assert "batch 4 fits; the next ones were not tried: 2 compiles" in capsys.readouterr().out


@pytest.mark.parametrize(("state_gib", "devices"), [(400, 4), (600, 8), (100, 1), (2000, None)])
def test_the_fewest_devices(monkeypatch, capsys, state_gib: int, devices: int | None):
    """Of 1, 2, 4 and 8, which divide the batch, the fewest whose 133.38 GiB each hold a share of the state."""

    def split(case: Any, *_: Any) -> Plan:
        return dataclasses.replace(made(case), device_peak_bytes=state_gib * 2**30 // case.target.devices)

    monkeypatch.setattr(planning, "planned", split)
    code = zoo_plan(monkeypatch, *TINY, "mesh.fsdp=2", "train.batch_size=8", "plan.minimise=devices")
    out = capsys.readouterr().out
    assert code == (1 if devices is None else 0)
    assert ("no devices tried fits" if devices is None else f"fewest devices that fits: {devices}") in out


def test_plans_of_every_command_line_of_training(instant, monkeypatch, tmp_path):
    assert zoo_plan(monkeypatch, "experiment=debug_deepseek", f"run.dir={tmp_path}", "train.steps=5") == 0
    assert not list(tmp_path.iterdir())


BAD = [
    ("target=h20", ["target=h20", "did you mean h200"]),
    ("target.devices=8", ["target.devices=8", "the mesh has 1"]),
    ("target=gb200 mesh.fsdp=6 train.batch_size=6", ["target.devices=6", "hosts of 4"]),
    ("target=gb200 mesh.fsdp=8 target.devices=8 target.topology=1x4x4", ["target.devices=8", "16 devices"]),
    ("target.hbm_bytes=0", ["target.hbm_bytes=0", "above zero"]),
    ("mesh.fsdp=3", ["train.batch_size=8", "fsdp"]),
    ("compare=[device,hst]", ["compare=hst", "did you mean host"]),
    ("compare=host", ["compare=host", "needs a list"]),
    ("plan.maximise=bach", ["plan.maximise=bach", "did you mean batch"]),
    ("plan.maximise=batch plan.minimise=devices", ["plan.minimise=devices", "one at a time"]),
    ("plan.published=deepseek", ["plan.published=deepseek", "did you mean deepseek_v3_gb200"]),
    ("plan.timeout_s=0", ["plan.timeout_s=0", "above zero"]),
    ("run.json=/nowhere/at/all/a.json", ["/nowhere/at/all"]),
    ("placement.activations.mlp_gat=host", ["placement.activations.mlp_gat=host", "did you mean mlp_gate"]),
    ("target=local", ["target=local", "no target describes a 'cpu'"]),
]


@pytest.mark.parametrize(("overrides", "needles"), BAD, ids=[overrides for overrides, _ in BAD])
def test_what_cannot_be_planned_exits_2(monkeypatch, tmp_path, capsys, overrides: str, needles: list[str]):
    monkeypatch.chdir(tmp_path)
    assert zoo_plan(monkeypatch, *overrides.split(), f"run.plans={tmp_path}") == 2
    err = capsys.readouterr().err
    for needle in needles:
        assert needle in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 6
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the compiler for TPUs is there")
def test_a_missing_compiler_is_named(monkeypatch, capsys):
    assert zoo_plan(monkeypatch, *TINY, "target=tpu_v6e", "mesh.fsdp=8", "train.batch_size=8", "run.plans=null") == 2
    assert "pip install 'offload-zoo[plan-tpu]'" in capsys.readouterr().err


def test_limits_of_a_compile(monkeypatch, capsys):
    assert zoo_plan(monkeypatch, *TINY, "plan.timeout_s=0.5", "run.plans=null") == 2
    err = capsys.readouterr().err
    assert "took more than 0.5 s" in err
    assert "plan.timeout_s" in err


def test_a_target_of_ones_own_is_one_file(instant, monkeypatch, tmp_path, capsys):
    text = (Path(plan_cli.__file__).parents[2] / "conf/target/cxl_tier.yaml").read_text()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine.yaml").write_text(text.replace("name: cxl_tier", "name: mine"))
    assert zoo_plan(monkeypatch, "--config-dir", str(tmp_path), "target=mine", *TINY) == 0
    assert "1 x mine" in capsys.readouterr().out


def test_a_plan_is_kept_by_all_that_it_depends_on():
    from recipes.plan.cases import Case
    from tests.recipes.test_plan import config_of

    case = Case("a", config_of(()), Target.named("h200"), {})
    same = dataclasses.replace(case, name="b")
    assert planning.fingerprint(case) == planning.fingerprint(same)
    others = [
        case.with_train(batch_size=4),
        case.with_model(num_layers=4),
        dataclasses.replace(case, target=Target.named("h100_sxm")),
        dataclasses.replace(case, options={"xla_gpu_enable_pipelined_host_offloading": True}),
        dataclasses.replace(case, config=config_of((("mlp_up", "host"),))),
    ]
    assert len({planning.fingerprint(each) for each in [case, *others]}) == 1 + len(others)


@pytest.mark.parametrize("arguments", [["--help"], ["target.devices=8"], ["--cfg", "job"]], ids=lambda words: words[0])
def test_errors_and_help_do_not_import_jax(arguments: list[str]):
    probe = (
        "import sys; from recipes.cli.plan import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'jax' not in sys.modules, 'jax was imported'"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
