"""What checkpoints cost: time of the training thread, resident memory over many saves, peak memory of restoring.

python -m tests.bench.checkpoint_cost time       the debug model, a save every 50 steps
python -m tests.bench.checkpoint_cost memory     20 saves of 0.6 GB, then restoring them in a process of its own
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hydra import compose, initialize_config_module

from recipes import schema
from recipes.checkpoints.restore import restore
from recipes.checkpoints.save import Saver
from recipes.data.batches import train_batches
from recipes.data.source import load
from recipes.setup import Setup

LARGE = "model=debug_llama model.dim=512 model.mlp_dim=2048 model.num_layers=14 model.head_dim=128 data=synthetic"
MB, SAVES, EVERY = 1e6, 20, 50


def setup(*overrides: str) -> Setup:
    schema.register()
    with initialize_config_module("conf", version_base="1.3"):
        return Setup(schema.read(compose("config", overrides=["run.dir=unused", *overrides])))


def saver(root: Path) -> Saver:
    return Saver(root, 2, 0, lambda folder, step: None)


def measure_time() -> None:
    run = setup("experiment=debug_deepseek")
    config = run.config
    sizes = {"sequence_length": config.train.sequence_length, "vocab_size": config.model.vocab_size}
    batches = train_batches(config.data, load(config.data, config.model.vocab_size), **sizes)
    state, steps, saves, after = run.drawn_state(), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        saving = saver(Path(folder))
        for number in range(1, 4 * EVERY + 1):
            start = time.perf_counter()
            state, metrics = run.step(state, run.batch(batches, number * config.train.batch_size))
            jax.device_get(metrics)
            (after if saves and number % EVERY <= 2 else steps).append(time.perf_counter() - start)
            if number % EVERY == 0:
                start = time.perf_counter()
                saving.save(state, number)
                saves.append(time.perf_counter() - start)
        saving.wait()
    step = float(np.median(steps[2:]))
    shares = ", ".join(f"{save / step:.1%}" for save in saves)
    print(
        f"step {step * 1e3:.0f} ms (median); a save holds it up by {shares} of that; after one: {max(after) / step:.2f}"
    )


def memory(what: str) -> int:
    """Bytes of this process: `RssAnon` (resident, without pages of files) or `VmHWM` (the most that was resident)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) * 1024


def filled(leaf: Any) -> jax.Array:
    return jax.device_put(np.random.default_rng(0).integers(0, 9, leaf.shape).astype(leaf.dtype))


def measure_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = jax.tree.map(filled, setup(*LARGE.split()).abstract_state())
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        saving, resident = saver(Path(folder)), []
        for step in range(1, SAVES + 1):
            saving.save(state, step)
            saving.wait()
            resident.append(memory("RssAnon"))
        third = resident[2]
        worst = max(abs(each - third) / third for each in resident[3:])
        print(f"state {size / MB:.0f} MB; resident after each save {[round(each / MB) for each in resident]} MB")
        print(f"off the third by at most {worst:.1%}")
        command = [sys.executable, "-m", "tests.bench.checkpoint_cost", "restore", f"{folder}/{SAVES}"]
        before, peak = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        print(
            f"restoring: {before / MB:.0f} MB before, at most {peak / MB:.0f}; "
            f"1.3 x the state + 300 MB: {1.3 * size / MB + 300:.0f} MB"
        )


def measure_restore(folder: str) -> None:
    wanted = setup(*LARGE.split()).abstract_state()
    print(memory("VmHWM"))
    state = restore(Path(folder), wanted)
    jax.block_until_ready(state)
    print(memory("VmHWM"))


if __name__ == "__main__":
    {"time": measure_time, "memory": measure_memory, "restore": measure_restore}[sys.argv[1]](*sys.argv[2:])
