"""Steps on a mesh, compiled for eight GPUs that are not there: what each holds, and what they send one another."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import recipes
import zoo
from recipes import MeshConfig, OptimizerConfig, Placement, make_mesh, make_optimizer, place, resolve
from recipes.plan.compile import CompiledMemory, compile_for, devices_of
from recipes.plan.targets import Target
from recipes.sharding.rules import constrain, constrain_batch
from recipes.verify.hlo_text import arrays
from tests import helpers

TARGET = Target.named("h200")
PLACEMENT = Placement(layers={"0": {"attn_query": "host", "mlp_gate": "host"}})
BATCH, SEQ, LAYERS = 8, 64, 3


def compiled(name: str, shape: dict[str, int], *, wide: bool = False) -> tuple[CompiledMemory, Any, int]:
    """What the compiler says of a bfloat16 step, its state, and the host bytes that the table asks for."""
    mesh = make_mesh(MeshConfig(**shape), devices_of(TARGET, 8))
    model = zoo.abstract(name, num_layers=LAYERS)
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), model)
    table = resolve(PLACEMENT, narrow, (jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32),))
    optimizer = make_optimizer(OptimizerConfig(), 10)
    placed = place(model, PLACEMENT, mesh, table=resolve(PLACEMENT, model))
    state = jax.eval_shape(lambda placed: recipes.init_state(placed, optimizer, jnp.bfloat16), placed)
    batch = {"tokens": jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)}
    step = recipes.make_train_step(optimizer, mesh=mesh, wide_gradients=wide, platform="cuda")
    with jax.numpy_dtype_promotion("standard"):
        found = compile_for(
            step, constrain(state, mesh), constrain_batch(batch, mesh), target=TARGET, options=helpers.FEWER_KERNELS
        )
    return found, state, table.place_bytes("host")


def results(hlo: str, operation: str) -> list[int]:
    """Bytes of each array that an operation, started or not, gives."""
    found = []
    for line in re.findall(rf"= (.*?) {operation}(?:-start)?\(", hlo):
        outputs = line.partition("), ")[2] if line.startswith("((") else line  # a start names what it was given first
        found += [each.num_bytes for each in arrays(outputs)]
    return found


@pytest.mark.parametrize("shape", [{"fsdp": 4, "tensor": 2}, *([{"fsdp": 8}] if helpers.LONG else [])], ids=str)
def test_each_device_holds_its_part_and_weights_are_gathered_layer_by_layer(shape: dict[str, int], capfd):
    memory, state, host_bytes = compiled("debug_llama", shape)
    state_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    batch_bytes = BATCH * (SEQ + 1) * 4 / (8 / shape.get("tensor", 1))
    assert memory.argument_bytes == pytest.approx(state_bytes / 8 + batch_bytes, rel=0.02)
    # Queries and gates are split by all axes; their batch by all but `tensor`, their heads and hidden dim by that one.
    assert memory.host_temp_bytes == host_bytes / 8
    layer = max(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(state.params.layers) if leaf.ndim == 3)
    embedding = math.prod(state.params.embedding.weight.shape)
    assert max(results(memory.hlo, "all-gather")) <= 2 * max(layer, embedding)
    assert results(memory.hlo, "reduce-scatter")
    assert "rematerialization" not in capfd.readouterr().err.lower()


def test_wide_gradients_are_summed_in_float32_and_in_parts_before_copies_of_everything():
    """Along `fsdp` each device gets the sum of its own part; only that part is summed over `replica`."""
    memory, state, _ = compiled("debug_llama", {"replica": 2, "fsdp": 4}, wide=True)
    sums = re.findall(r"= (.*?) (?:reduce-scatter|all-reduce)(?:-start)?\(", memory.hlo)
    assert sums
    assert not [each for each in sums if "bf16" in each]
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    assert sum(results(memory.hlo, "all-reduce")) < 1.1 * 4 * weights / 4
