"""Compile time by the number of runs: 32 layers in 1 run against 20, gradients of both families, for an absent H200.

python -m tests.bench.compile_runs
"""

import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp

from recipes import Placement, next_token_loss, place, resolve
from recipes.plan.compile import compile_for
from recipes.plan.targets import Target
from zoo import abstract

LAYERS, BATCH, SEQ, REPEATS = 32, 4, 256, 3
FIELDS: dict[str, dict[str, Any]] = {
    "debug_llama": {"num_layers": LAYERS},
    "debug_deepseek": {"num_layers": LAYERS, "num_dense_layers": 0},
}
# Layers 0, 2, ... 18 stand alone: with those between them and the rest, 20 runs of one kind of block.
TWENTY = Placement(layers={"+".join(map(str, range(0, 20, 2))): {"attn_query": "host"}})
PLACEMENTS = {1: Placement(activations={"attn_query": "host"}), 20: TWENTY}


def compile_s(model: Any, placement: Placement, runs: int) -> float:
    """Seconds that XLA takes for the gradient of the loss, the median of some."""
    table = resolve(placement, model)
    placed = place(model, placement, table=table)
    assert table.num_segments == runs, f"{table.num_segments} runs instead of {runs}"
    batch = {"tokens": jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)}

    def gradient(model: Any, batch: Any) -> Any:
        return jax.grad(lambda model: next_token_loss(model, batch, balance=1e-2).total)(model)

    times = []
    for _ in range(REPEATS):
        jax.clear_caches()
        times.append(compile_for(gradient, placed, batch, target=Target.named("h200")).compile_s)
    return statistics.median(times)


def main() -> None:
    print(f"{LAYERS} layers, batch {BATCH}, sequence {SEQ}; median of {REPEATS}", file=sys.stderr)
    print("model            1 run [s]  20 runs [s]  ratio")
    for name, fields in FIELDS.items():
        model = abstract(name, **fields)
        one, twenty = (compile_s(model, placement, runs) for runs, placement in PLACEMENTS.items())
        print(f"{name:15}  {one:9.1f}  {twenty:11.1f}  {twenty / one:5.2f}")


if __name__ == "__main__":
    main()
