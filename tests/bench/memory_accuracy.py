"""The planned peak of a train step beside the one that the device at hand reports after it has run. Needs a GPU.

python -m tests.bench.memory_accuracy
"""

import os
import subprocess
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

PLACEMENTS = ("device", "remat", "block_input_host")
LAYERS, BATCH, SEQ = 16, 4, 2048


def report(placement: str) -> None:
    """A Llama 3.2 1B in bfloat16: the plan for the device, one step on it, both peaks and the error."""
    import jax
    import jax.numpy as jnp

    import recipes
    from recipes.config import Config, RunConfig, TrainConfig
    from recipes.data.config import DataConfig
    from recipes.plan.local import at_hand
    from recipes.plan.pricing import price_step
    from recipes.plan.targets import Target
    from recipes.setup import Setup
    from zoo import registry

    config = Config(
        model=registry.config("llama3_2_1b", num_layers=LAYERS),
        placement=recipes.Placement.preset(placement),
        explain=False,
        mesh=recipes.MeshConfig(),
        optimizer=recipes.OptimizerConfig(),
        data=DataConfig(source="synthetic"),
        train=TrainConfig(batch_size=BATCH, sequence_length=SEQ, dtype="bfloat16"),
        run=RunConfig(dir="runs"),
    )
    plan = price_step(config, at_hand(Target.named("local")), placement)
    setup = Setup(config)
    state = setup.drawn_state()
    batch = {"tokens": jnp.zeros((BATCH, SEQ + 1), jnp.int32)}
    _, metrics = setup.step(state, batch)
    jax.block_until_ready(metrics)
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        sys.exit(f"{jax.devices()[0].device_kind} reports no memory")
    peak, planned = stats["peak_bytes_in_use"], plan.device_peak_bytes
    print(
        f"{placement}: planned {planned / 2**30:.3f} GiB, reported {peak / 2**30:.3f}, "
        f"error {planned / peak - 1:+.2%}; host {plan.host_bytes / 2**30:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        report(sys.argv[1])
    else:  # a process each: the reported peak is that of a whole process
        for name in PLACEMENTS:
            subprocess.run([sys.executable, "-m", "tests.bench.memory_accuracy", name], check=True)
