"""Whole train steps compiled for many GB200 that are not there: seconds, what each of them holds, what they gather.

python -m tests.bench.compile_mesh
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

import zoo
from recipes import (
    MeshConfig,
    OptimizerConfig,
    Placement,
    init_state,
    make_mesh,
    make_optimizer,
    make_train_step,
    place,
    resolve,
)
from recipes.plan.compile import CompiledMemory, compile_for, devices_of
from recipes.plan.isolate import isolated
from recipes.plan.targets import Target
from recipes.sharding.rules import constrain, constrain_batch
from recipes.verify.hlo_text import arrays

SEQ = 256
LLAMA, DEEPSEEK = Placement.preset("blog_llama"), Placement(activations={"moe_gate": "host"})
GATHER = re.compile(r"= (.*?) all-gather(?:-start)?\(")
CASES: list[tuple[str, Placement, dict[str, int]]] = [
    ("llama3_1_70b", LLAMA, {}),
    ("llama3_1_70b", LLAMA, {"fsdp": 8}),
    ("llama3_1_405b", LLAMA, {"fsdp": 128}),
    ("deepseek_v3_671b", DEEPSEEK, {"expert": 64, "fsdp": 2}),
]


def compiled(name: str, placement: Placement, shape: dict[str, int]) -> tuple[CompiledMemory, int]:
    """What the compiler says, and the bytes of the whole state. A sequence a device, bfloat16 with float32 masters."""
    target, config = Target.named("gb200"), MeshConfig(**shape)
    count = config.num_devices
    mesh = make_mesh(config, devices_of(target, count)) if count > 1 else None
    model, optimizer = zoo.abstract(name), make_optimizer(OptimizerConfig(), 100)
    table = resolve(placement, model, (jax.ShapeDtypeStruct((count, SEQ), jnp.int32),))
    placed = place(model, placement, mesh, table=table)
    state = constrain(jax.eval_shape(lambda placed: init_state(placed, optimizer, jnp.bfloat16), placed), mesh)
    batch: Any = {"tokens": jax.ShapeDtypeStruct((count, SEQ + 1), jnp.int32)}
    step = make_train_step(optimizer, mesh=mesh, platform="cuda")
    memory = compile_for(step, state, batch if mesh is None else constrain_batch(batch, mesh), target=target)
    return memory, sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def report(name: str, placement: Placement, shape: dict[str, int]) -> None:
    """One line a program. The compiler's warnings come from a process of its own."""
    (memory, state_bytes), log = isolated(compiled, name, placement, shape, timeout_s=600)
    count = MeshConfig(**shape).num_devices
    largest = max((each.num_bytes for line in GATHER.findall(memory.hlo) for each in arrays(line)), default=0)
    print(
        f"{name} on {count}: {memory.compile_s:.1f} s; arguments {memory.argument_bytes / 2**30:.2f} GiB a device, "
        f"the state's share {state_bytes / count / 2**30:.2f}; temporaries {memory.temp_bytes / 2**30:.2f}, "
        f"host {memory.host_temp_bytes / 2**30:.2f}; largest all-gather {largest / 2**30:.2f}; "
        f"{log.count('Involuntary full rematerialization')} involuntary rematerializations",
        flush=True,
    )


if __name__ == "__main__":
    for case in CASES:
        report(*case)
