"""A model whose state fills more than half of a GPU, trained with the state on the device and on the host.

    python -m tests.bench.state_on_gpu                       # sized for the GPU at hand; under four minutes
    python -m tests.bench.state_on_gpu --layers 2 --model debug_llama --sequence 64

Needs no Hydra. Each run has a process of its own, since a device's peak is that of its process. Prints losses, which
must be equal, times of steps and measured peaks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

STATES: dict[str, dict[str, str]] = {
    "device": {},
    "zero_offload": {"master": "host", "optimizer": "host"},
    "host": {"params": "host", "master": "host", "optimizer": "host"},
}
STATE_BYTES = 12  # a parameter: float32 itself and two moments


def layers_for(model: str, device_bytes: int) -> int:
    """The number of layers whose state takes 0.55 of the device."""
    import zoo

    one, two = (zoo.count_parameters(model, num_layers=n) for n in (1, 2))
    return max(1, int((0.55 * device_bytes / STATE_BYTES - (2 * one - two)) / (two - one)))


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains with one placement of the state."""
    import jax

    import recipes
    import zoo

    model = zoo.build(args.model, key=jax.random.key(0), num_layers=args.layers)
    placement = recipes.Placement(default="remat", state=STATES[name])  # type: ignore[arg-type]
    optimizer = recipes.make_optimizer(recipes.OptimizerConfig(learning_rate=1e-4), steps=args.steps)
    state = recipes.init_state(recipes.place(model, placement), optimizer)
    step = recipes.make_train_step(optimizer)
    losses, times = [], []
    for number in range(args.steps):
        tokens = jax.random.randint(jax.random.key(number + 1), (args.batch, args.sequence + 1), 0, 256)
        start = time.perf_counter()
        state, metrics = step(state, {"tokens": tokens})
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "losses": losses,
        "first_s": times[0],
        "step_s": statistics.median(times[1:]),
        "peak_bytes": peak,
        "host_arrays": kinds.count("pinned_host"),
        "arrays": len(kinds),
    }


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own."""
    sizes = {"model": args.model, "layers": args.layers, "steps": args.steps}
    sizes |= {"batch": args.batch, "sequence": args.sequence, "only": name}
    command = [sys.executable, "-m", "tests.bench.state_on_gpu"]
    command += [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
    # Pinned memory is capped at 64 GB a process by default; all of the device's memory is ours.
    limits = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1000", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    done = subprocess.run(command, env=limits | os.environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{name}: the run ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="llama3_1_8b")
    parser.add_argument("--layers", type=int, default=0, help="0: so many that the state takes 0.55 of the device")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--only", choices=STATES)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args)))
        return
    if not args.layers:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
        mebibytes = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
        args.layers = layers_for(args.model, mebibytes * 2**20)
    import zoo

    count = zoo.count_parameters(args.model, num_layers=args.layers)
    print(f"{args.model}, {args.layers} layers: {count:,} parameters, {count * STATE_BYTES / 2**30:.1f} GiB of state")
    results = {name: run(name, args) for name in STATES}
    for name, each in results.items():
        peak = "peak not known" if each["peak_bytes"] is None else f"peak {each['peak_bytes'] / 2**30:.1f} GiB"
        ratio = each["step_s"] / results["device"]["step_s"]
        there = f"{each['host_arrays']} of {each['arrays']} arrays on the host"
        print(
            f"{name:13} {each['step_s']:.3f} s a step ({ratio:.2f} x), first {each['first_s']:.1f} s, {peak}, {there}"
        )
    equal = all(each["losses"] == results["device"]["losses"] for each in results.values())
    print(
        f"losses {'equal' if equal else 'DIFFER'}: {', '.join(f'{loss:.6f}' for loss in results['device']['losses'])}"
    )
    if not equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
