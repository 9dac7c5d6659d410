"""Step time of the comparison models, each under several placements, and of the bare-JAX floor: interleaved in one run.

Run: .venv/bin/python -m tests.bench.step_time [bench_llama|bench_deepseek] [--steps 15]

Prints the median of each and its ratio to the first line. Steps are taken in turn, so that a slow spell of the machine
hits all alike. Same batch, optimizer and clipping for all: AdamW, batch 4 x 512 tokens, vocabulary 1024.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

import recipes
import zoo
from tests.bench import bare_llama

STEPS, BATCH, LENGTH, VOCAB = 300, 4, 512, 1024
OPTIMIZER = recipes.OptimizerConfig(learning_rate=3e-5)


def bare() -> Callable[[jax.Array], float]:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-5, 0.9, 0.95, weight_decay=0.1))
    params = bare_llama.init(jax.random.key(0))
    state = (params, optimizer.init(params))

    @jax.jit
    def step(state, tokens):
        params, moments = state
        loss, gradients = jax.value_and_grad(bare_llama.loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def run(tokens: jax.Array) -> float:
        nonlocal state
        state, loss = step(state, tokens)
        return float(jax.block_until_ready((state, loss))[1])

    return run


def make_step(model: str, preset: str) -> tuple[Any, recipes.TrainState]:
    """The jitted step under a preset, and the state to begin with."""
    placement, optimizer = recipes.Placement.preset(preset), recipes.make_optimizer(OPTIMIZER, STEPS)
    state = recipes.init_state(recipes.place(zoo.build(model, key=jax.random.key(0)), placement), optimizer)
    return recipes.make_train_step(optimizer), state


def ours(model: str, preset: str) -> Callable[[jax.Array], float]:
    step, state = make_step(model, preset)

    def run(tokens: jax.Array) -> float:
        nonlocal state
        state, metrics = step(state, {"tokens": tokens})
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bench_llama")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, VOCAB)
    steps = {"bare JAX, remat": bare()} if args.model == "bench_llama" else {}
    steps |= {f"{args.model}, {preset}": ours(args.model, preset) for preset in ("remat", "device", "host")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        run(tokens)  # compiles
    for _ in range(args.steps):
        for name, run in steps.items():
            start = time.perf_counter()
            run(tokens)
            times[name].append(time.perf_counter() - start)
    first = statistics.median(next(iter(times.values())))
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:28s} median {median:.3f} s  min {min(seconds):.3f} s  ratio {median / first:.3f}")


if __name__ == "__main__":
    main()
