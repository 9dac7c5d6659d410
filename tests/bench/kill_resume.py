"""Kills a run at random moments and resumes it until it is done, then compares it with a run that was left alone.

    python -m tests.bench.kill_resume [KILLS, by default 50] [SEED]

Most kills come within a few steps of a random one, while checkpoints are being written more often than not; one in
eight comes while the run is starting. After each kill every complete checkpoint must be readable to its last array; in
the end `metrics.jsonl` must hold every step once, with the numbers of the other run to the bit, and the last checkpoint
the same arrays.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from recipes.checkpoints import folder as folders
from recipes.checkpoints.leaves import TRAINING
from zoo.arrays import open_arrays, read
from zoo.checkpoint import WEIGHTS, CheckpointSource

TIMES = ("step_s", "tokens_per_s")
APART = 30  # steps between two kills, at most
RUN = """
model=debug_llama model.dim=16 model.num_layers=2 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8
model.mlp_dim=16 model.vocab_size=64 train.batch_size=2 train.sequence_length=8 train.validation_batches=1
train.validate_every=11 train.checkpoint_every=4 train.sample_tokens=0 data=synthetic verify=false
""".split()


def start(folder: Path, steps: int) -> subprocess.Popen:
    places = [f"run.dir={folder}", f"run.compile_cache={folder.parent / 'compiled'}"]
    command = [sys.executable, "-m", "recipes.cli.train", *RUN, f"train.steps={steps}", *places]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def inode(folder: Path) -> int:
    """Which file the log is: a run that goes on puts a shorter one in its place."""
    log = folder / "metrics.jsonl"
    return log.stat().st_ino if log.exists() else 0


def rows(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint; raises if one cannot be read."""
    CheckpointSource(folder)
    return {
        f"{name}/{path}": read(folder / name, path, array)
        for name in (WEIGHTS, TRAINING)
        for path, array in open_arrays(folder / name).items()
    }


def kill_once(folder: Path, steps: int, rng: random.Random, starting_s: float) -> None:
    """Starts the run, or has it go on, and kills it at a random moment."""
    before, process = inode(folder), start(folder, steps)
    if rng.random() < 1 / 8:
        time.sleep(rng.uniform(0, starting_s))
    else:
        saved = folders.steps(folder / folders.NAME)
        target = (saved[-1] if saved else 0) + rng.randint(1, APART)
        while process.poll() is None:
            if inode(folder) != before and max((row["step"] for row in rows(folder)), default=0) >= target:
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
    process.kill()
    out, _ = process.communicate()
    assert process.returncode == -9, f"it ended by itself:\n{out}"


def kill_and_resume(root: Path, kills: int, seed: int = 0) -> str:
    """Asserts all that the head of this file says; returns a line about it."""
    rng, steps = random.Random(seed), (kills + 1) * APART
    begun = time.monotonic()
    alone = start(root / "alone", steps)
    out, _ = alone.communicate()
    assert alone.returncode == 0, out
    starting_s, folder = min(10.0, time.monotonic() - begun), root / "killed"
    half_written = 0
    for _ in range(kills):
        kill_once(folder, steps, rng, starting_s)
        checkpoints = folder / folders.NAME
        half_written += any(checkpoints.glob("*.unfinished"))
        for step in folders.steps(checkpoints):
            arrays(checkpoints / str(step))
        print(f"killed within step {rows(folder)[-1]['step'] if rows(folder) else 0}", flush=True)
    last = start(folder, steps)
    out, _ = last.communicate()
    assert last.returncode == 0, out
    same_numbers(rows(folder), rows(root / "alone"))
    mine, other = (arrays(each / folders.NAME / str(steps)) for each in (folder, root / "alone"))
    assert mine.keys() == other.keys()
    assert all(np.array_equal(mine[path], other[path]) for path in mine)
    return f"{kills} kills of a run of {steps} steps, {half_written} of them within a save: the same to the bit"


def same_numbers(killed: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Every step once, in order, with equal figures but for those of time."""
    assert [row["step"] for row in killed if "loss" in row] == list(range(1, killed[-1]["step"] + 1))
    here, there = ([{k: v for k, v in row.items() if k not in TIMES} for row in log] for log in (killed, alone))
    assert here == there


def main() -> None:
    kills, seed = (int(word) for word in [*sys.argv[1:], *("50", "0")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        print(kill_and_resume(Path(folder), kills, seed), f"{time.monotonic() - begun:.0f} s", sep="; ")


if __name__ == "__main__":
    main()
