"""The comparison models on the device at hand, and what a large model costs before any array is made.

Step times here are one after another; `python -m tests.bench.step_time` takes them in turn with the bare-JAX floor.
"""

from typing import Any

import jax
import pytest

import zoo
from recipes import Placement, place, resolve
from tests.bench.step_time import VOCAB, bare, make_step, ours

MODELS = ["bench_llama", "bench_deepseek"]


def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (4, 513), 0, VOCAB)


@pytest.mark.benchmark(group="step of 4 x 512 tokens")
@pytest.mark.parametrize("preset", ["remat", "device", "host"])
@pytest.mark.parametrize("model", MODELS)
def bench_step(benchmark: Any, model: str, preset: str):
    run, batch = ours(model, preset), tokens()
    run(batch)
    benchmark.pedantic(run, (batch,), rounds=5)


@pytest.mark.benchmark(group="step of 4 x 512 tokens")
def bench_step_of_bare_jax(benchmark: Any):
    run, batch = bare(), tokens()
    run(batch)
    benchmark.pedantic(run, (batch,), rounds=5)


@pytest.mark.benchmark(group="compiling the step")
@pytest.mark.parametrize("model", MODELS)
def bench_compile(benchmark: Any, model: str):
    step, state = make_step(model, "remat")

    def compile_step() -> None:
        jax.clear_caches()
        step.lower(state, {"tokens": tokens()}).compile()

    benchmark.pedantic(compile_step, rounds=3)


@pytest.mark.benchmark(group="DeepSeek-V3 671B without arrays")
def bench_abstract(benchmark: Any):
    benchmark(zoo.abstract, "deepseek_v3_671b")


@pytest.mark.benchmark(group="DeepSeek-V3 671B without arrays")
def bench_resolve_and_place(benchmark: Any):
    model, placement = zoo.abstract("deepseek_v3_671b"), Placement.preset("blog_deepseek")
    benchmark(lambda: place(model, placement, table=resolve(placement, model)))
