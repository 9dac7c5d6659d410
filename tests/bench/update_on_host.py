"""What XLA makes of an update on the host's processor, compiled for a GPU that is not there.

    python -m tests.bench.update_on_host

A loop carries stacks in host memory; `jax.experimental.compute_on` computes a layer's new values on the host. It ought
to need no copy of the state over the link. It has them: the slice of a host stack becomes an asynchronous copy to the
device, and the call on the host takes it from there.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipes.placement.hosted import HOST, abstract, move
from recipes.plan.compile import compile_for, devices_of
from recipes.plan.targets import Target

LAYERS, ROWS, COLUMNS = 8, 4096, 1024


def update(weight: Any, moment: Any, gradient: Any) -> tuple[Any, Any]:
    moment = 0.9 * moment + 0.1 * gradient
    return weight - 1e-3 * moment, moment


def step(weights: Any, moments: Any, gradients: Any) -> Any:
    def visit(stacks: tuple, layer: Any) -> tuple[tuple, None]:
        now = [jax.lax.dynamic_slice_in_dim(stack, layer, 1) for stack in stacks]
        gradient = move(jax.lax.dynamic_slice_in_dim(gradients, layer, 1), "host")
        on_host: Any = compute_on(update, compute_type="device_host", out_memory_spaces=HOST)
        after = on_host(*now, gradient)
        pairs = zip(stacks, after, strict=True)
        return tuple(jax.lax.dynamic_update_slice_in_dim(old, new, layer, 0) for old, new in pairs), None

    stacks = move(weights, "host"), move(moments, "host")
    return jax.lax.scan(visit, stacks, jnp.arange(LAYERS, dtype=jnp.int32))[0]


def main() -> None:
    """Compiles the loop and prints its copies of state and the operands of the call on the host."""
    target = Target.named("h100_sxm")
    mesh = Mesh(np.array(devices_of(target)), ("device",))
    one = jax.ShapeDtypeStruct((LAYERS, ROWS, COLUMNS), jnp.float32)
    places = ("host", "host", "device")
    args = [abstract(one, NamedSharding(mesh, PartitionSpec()), place) for place in places]
    hlo = compile_for(jax.jit(step, donate_argnums=(0, 1)), *args, target=target).hlo
    for line in hlo.splitlines():
        if re.search(r"dynamic-(update-)?slice-start|custom-call-start", line):
            print(re.sub(r", (metadata|kind|calls|backend_config|control).*", "", line.strip()))
    print("S(5) is host memory; what has none lies on the device")


if __name__ == "__main__":
    main()
