"""Several processes save one checkpoint, and learn of a signal after the same step."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from recipes.checkpoints import folder as folders
from recipes.checkpoints.restore import restore
from tests import helpers
from tests.recipes.checkpoints.common import LLAMA, arrays, setup, steps

SIZES = ["mesh.fsdp=2", "optimizer.schedule=constant", "train.checkpoint_every=1000000"]


def start(folder: Path, port: int, index: int) -> subprocess.Popen:
    others = "train.distributed={coordinator:127.0.0.1:%d,processes:2,index:%d}" % (port, index)  # noqa: UP031
    words = [*LLAMA, *SIZES, "train.steps=1000000", others, "run.compile_cache=null", f"run.dir={folder}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "recipes.cli.train", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_sigterm_to_one_of_two_processes_saves_for_both_and_one_process_goes_on_from_there(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [start(tmp_path, port, index) for index in range(2)]
    try:
        log, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 240
        while not (log.exists() and log.stat().st_size) and both[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        both[1].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [143, 143], said
    done = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert done == list(range(1, len(done) + 1))
    assert folders.steps(tmp_path / folders.NAME) == [len(done)]
    assert f"stopped after {len(done)} steps" in said[0][0]

    run = setup(*LLAMA, *SIZES, devices=2)
    state = restore(tmp_path / folders.NAME / str(len(done)), run.abstract_state())
    expected, _ = steps(run, run.drawn_state(), len(done))
    assert (int(state.step), int(state.cursor)) == (len(done), 8 * len(done))
    here, there = arrays(state), arrays(expected)
    for name in there:
        np.testing.assert_allclose(here[name], there[name], rtol=0, atol=helpers.FLOAT32 * np.abs(there[name]).max())
