"""Several processes on this machine are one run, and none outlives another."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.config import Distributed
from recipes.processes import LOST_S, launcher
from tests.recipes.common import QUICK

STEPS = 4
SIZES = ["train.batch_size=4", "optimizer.schedule=constant", "mesh.fsdp=2", "data=synthetic", "train.steps=1000000"]
SIZES += ["train.checkpoint_every=0"]  # each has a folder of its own, to show that the second writes nothing


def start(folder: Path, devices: int, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "recipes.cli.train", *QUICK, *SIZES, *overrides, f"run.dir={folder}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def losses(log: Path) -> list[float]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line)["loss"] for line in lines[:STEPS]]


def test_two_processes_train_as_one_and_the_death_of_one_ends_the_other(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = "train.distributed={coordinator:127.0.0.1:%d,processes:2,index:%d}"
    first, second = (start(tmp_path / str(index), 1, others % (port, index)) for index in range(2))
    try:
        log, deadline = tmp_path / "0" / "metrics.jsonl", time.monotonic() + 240
        while len(losses(log)) <= STEPS - 1 and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        second.kill()
        out, err = first.communicate(timeout=2 * LOST_S)
    finally:
        first.kill()
        silent, _ = second.communicate()
    assert first.returncode == 1, err
    assert err.startswith("zoo-train: process 0 of 2 lost another process and stops: "), err
    assert "compiled the step" in out
    assert "step" not in silent
    assert not (tmp_path / "1").exists()
    alone = start(tmp_path / "alone", 2, f"train.steps={STEPS}")
    assert alone.wait(timeout=240) == 0, alone.communicate()
    alone.communicate()
    assert losses(log) == pytest.approx(losses(tmp_path / "alone" / "metrics.jsonl"), rel=1e-6)


def test_launchers_that_start_several_processes_are_seen(monkeypatch):
    names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES", "JAX_COORDINATOR_ADDRESS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")  # an allocation of four, of which no srun started this one
    assert launcher("auto") is None
    for name, value in zip(names, ("2", "8", "a,b", "host:1"), strict=True):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert launcher("auto") == Distributed()
            assert launcher(None) is None
    given = Distributed(coordinator="host:1", processes=2, index=1)
    assert launcher(given) is given
