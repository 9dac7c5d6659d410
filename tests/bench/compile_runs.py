"""Compile time by the number of segments: gradients for an H200 that is not there.

python -m tests.bench.compile_runs             both families: 4 and 64 layers in one segment, 32 layers in 1 and in 20
python -m tests.bench.compile_runs tables 100  random tables of 32 layers: host bytes as asked? how long does each take?
python -m tests.bench.compile_runs steps       whole train steps, every second of 20 layers on the host
"""

import random
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp

from recipes import (
    OptimizerConfig,
    Placement,
    Table,
    init_state,
    make_optimizer,
    make_train_step,
    next_token_loss,
    place,
    resolve,
)
from recipes.placement.spec import PLACES
from recipes.plan.compile import CompiledMemory, compile_for
from recipes.plan.targets import Target
from zoo import abstract

LAYERS, BATCH, SEQ, REPEATS = 32, 4, 256, 3
FIELDS: dict[str, dict[str, Any]] = {"debug_llama": {}, "debug_deepseek": {"num_dense_layers": 0}}
EXAMPLE = (jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32),)
BATCH_OF_TOKENS = {"tokens": jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)}
ONE = Placement(activations={"attn_query": "host"})
# Layers 0, 2, ... 18 stand alone: with those between them and the rest, 20 segments.
TWENTY = Placement(layers={"+".join(map(str, range(0, 20, 2))): {"attn_query": "host"}})


def compiled(model: Any, placement: Placement) -> tuple[Table, CompiledMemory]:
    """The gradient of the loss under a placement, traced and compiled anew."""
    table = resolve(placement, model, EXAMPLE)
    placed = place(model, placement, table=table)

    def gradient(model: Any, batch: Any) -> Any:
        return jax.grad(lambda model: next_token_loss(model, batch, balance=1e-2).total)(model)

    jax.clear_caches()
    return table, compile_for(gradient, placed, BATCH_OF_TOKENS, target=Target.named("h200"))


def seconds(name: str, num_layers: int, placement: Placement, segments: int) -> float:
    """The median of some."""
    model = abstract(name, num_layers=num_layers, **FIELDS[name])
    found = [compiled(model, placement) for _ in range(REPEATS)]
    assert {table.num_segments for table, _ in found} == {segments}
    return statistics.median(memory.compile_s for _, memory in found)


def random_placement(seed: int) -> Placement:
    """Each layer has one of two or three rows, each of them random."""
    draw = random.Random(seed)
    tags = [tag for tag in resolve(ONE, abstract("debug_llama"), EXAMPLE).layers[0] if not tag.endswith("_lse")]
    rows = [
        {tag: draw.choice(("device", "host") if tag == "block_input" else PLACES) for tag in tags}
        for _ in range(draw.randint(2, 3))
    ]
    return Placement(layers={str(layer): draw.choice(rows) for layer in range(LAYERS)})


def tables(count: int) -> None:
    """Each table in turn with one segment, twice, so that a slow spell hits both; of each the shorter time."""
    model = abstract("debug_llama", num_layers=LAYERS)
    ratios, segments, wrong = [], [], 0
    for seed in range(count):
        placement = random_placement(seed)
        runs = [(compiled(model, ONE)[1].compile_s, *compiled(model, placement)) for _ in range(2)]
        one, (table, _), (memory, again) = zip(*runs, strict=True)
        ratios.append(min(memory.compile_s, again.compile_s) / min(one))
        segments.append(table.num_segments)
        wrong += memory.host_temp_bytes != table.place_bytes("host")
    print(f"{count} random tables of {LAYERS} layers, {min(segments)} to {max(segments)} segments; wrong: {wrong}")
    late = statistics.quantiles(ratios, n=20, method="inclusive")[-1]  # else beyond the largest of few
    print(f"compile time over that of one segment: median {statistics.median(ratios):.2f} x, 95% {late:.2f} x")


def steps() -> None:
    """Whole train steps in bfloat16 with float32 masters."""
    second = {"+".join(map(str, range(0, 20, 2))): {"attn_query": "host"}}
    placements = {"uniform": ONE, "group=2": Placement(layers=second, group=2), "group=1": Placement(layers=second)}
    optimizer = make_optimizer(OptimizerConfig(), 100)
    step = make_train_step(optimizer, router_bias_rate=1e-3, platform="cuda")
    for name, fields in FIELDS.items():
        model = abstract(name, num_layers=20, **fields)
        first = None
        for label, placement in placements.items():
            table = resolve(placement, model, EXAMPLE)
            placed = place(model, placement, table=table)
            state = jax.eval_shape(lambda placed: init_state(placed, optimizer, jnp.bfloat16), placed)
            jax.clear_caches()
            memory = compile_for(step, state, BATCH_OF_TOKENS, target=Target.named("h200"))
            first = first or memory.compile_s
            print(
                f"{name}, {label}: {table.num_segments} segment(s), {memory.compile_s:.1f} s, "
                f"{memory.compile_s / first:.2f} x, {memory.temp_bytes / 2**20:.0f} MiB of temporaries"
            )


def ratios() -> None:
    print("model            4 layers [s]  64 layers [s]  ratio   1 segment [s]  20 segments [s]  ratio")
    for name in FIELDS:
        four, many = seconds(name, 4, ONE, 1), seconds(name, 64, ONE, 1)
        one, twenty = seconds(name, LAYERS, ONE, 1), seconds(name, LAYERS, TWENTY, 20)
        print(
            f"{name:15}  {four:12.1f}  {many:13.1f}  {many / four:5.2f}"
            f"  {one:14.1f}  {twenty:15.1f}  {twenty / one:5.2f}"
        )


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 1 else "ratios"
    {"tables": lambda: tables(int(sys.argv[2])), "steps": steps, "ratios": ratios}[mode]()
