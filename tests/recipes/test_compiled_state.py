"""Steps with their state on the host, compiled for eight H100 that are not there; and a step that moves all of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from recipes import MeshConfig, Placement
from recipes.config import Config
from recipes.flags import compiler_options
from recipes.placement.segments import ON_DEVICE, replace_state
from recipes.plan.compile import CompiledMemory, compile_lowered, lower_for
from recipes.plan.memory import local_bytes, tree_bytes
from recipes.plan.targets import Target
from recipes.step.state import settled_state
from recipes.verify import Subject, check_hlo, trace
from recipes.verify.arguments import Argument, arguments_of, check_arguments
from recipes.verify.hlo import Compiled
from recipes.verify.hlo_text import parse
from recipes.verify.proof import subject
from recipes.verify.transfers import Transfer, transfers
from tests import helpers
from tests.recipes.test_gradients import config
from zoo.llama.config import LlamaConfig

TARGET = Target.named("h100_sxm")
DEVICES = 8
LLAMA = LlamaConfig(vocab_size=64, dim=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=256)
HOST: dict[str, Any] = {"params": "host", "master": "host", "optimizer": "host"}


class Found(NamedTuple):
    subject: Subject
    memory: CompiledMemory
    arguments: tuple[Argument, ...]
    report: Compiled


def asked(layers: int, **state: str) -> Config:
    """Block inputs on the host too: all that stays on the device from pass to pass is gradients."""
    placement = Placement(activations={"block_input": "host"}, state=HOST | state)  # type: ignore[arg-type]
    model = dataclasses.replace(LLAMA, num_layers=layers)
    small = config(model, placement, batch_size=DEVICES, sequence_length=32, dtype="bfloat16")
    return dataclasses.replace(small, mesh=MeshConfig(fsdp=DEVICES))


@functools.cache
def compiled(layers: int, gradients: str = "device") -> Found:
    return checked(subject(asked(layers, gradients=gradients), TARGET))


def checked(made: Subject, fn: Callable | None = None) -> Found:
    fn = made.fn if fn is None else fn
    with jax.numpy_dtype_promotion("standard"):
        lowered = lower_for(fn, *made.args, target=TARGET)[1]
        traced = trace(fn, *made.args, asked=made.asked)
    memory, arguments = compile_lowered(lowered, TARGET, helpers.KERNELS), arguments_of(lowered, made.args)
    sizes = {"host_temp_bytes": memory.host_temp_bytes, "gradient_bytes": made.gradient_bytes}
    report = check_hlo(memory.hlo, traced, devices=made.devices, arguments=arguments, **sizes)
    return Found(made, memory, arguments, report)


def test_the_state_is_on_the_host_to_the_byte_and_changed_in_place():
    found = compiled(4)
    memory, state = found.memory, found.subject.args[0]
    assert memory.host_argument_bytes == memory.host_output_bytes == memory.host_alias_bytes
    assert memory.host_argument_bytes == tree_bytes(state, "host") > 100 * tree_bytes(state, "device")
    assert memory.host_temp_bytes == found.subject.asked.place_bytes("host") / DEVICES  # type: ignore[union-attr]
    assert found.report.ok, str(found.report)
    hosted = [each for each in found.report.state if each.asked == "host"]
    assert len(hosted) == sum(each.ndim > 0 for each in jax.tree.leaves(state))
    assert "state: 54 of 54 arrays where asked" in str(found.report)


def test_the_device_holds_gradients_and_nothing_else_of_further_layers():
    more, fewer = compiled(4), compiled(2)
    blocks = jax.tree.leaves(more.subject.args[0].params.layers)
    gradients = sum(map(local_bytes, blocks)) // 2
    assert more.memory.temp_bytes - fewer.memory.temp_bytes == pytest.approx(gradients, abs=256 * len(blocks))


def test_gradients_on_the_host():
    """Those of layers; what stands outside of them arises on the device and is used there."""
    found = compiled(4, "host")
    assert found.report.ok, str(found.report)
    assert found.memory.temp_bytes < compiled(4).memory.temp_bytes
    layers = sum(map(local_bytes, jax.tree.leaves(found.subject.args[0].params.layers)))
    on_host = found.memory.host_temp_bytes - compiled(4).memory.host_temp_bytes
    assert layers <= on_host <= found.subject.gradient_bytes


def test_a_step_that_moves_the_whole_tree_is_caught():
    """All of the state to the device, the same change of each number there, and all of it back, in place."""
    right = compiled(2).subject
    hosted = right.args[0].params.layers.state

    def whole(state: Any, batch: Any) -> Any:
        now = settled_state(replace_state(state, ON_DEVICE))
        new = jax.tree.map(lambda x: x + (jnp.sum(batch["tokens"]) + 1).astype(x.dtype), now)
        return settled_state(replace_state(new, hosted))

    fn = jax.jit(whole, donate_argnums=0, compiler_options=compiler_options("cuda"))
    lowered = lower_for(fn, *right.args, target=TARGET)[1]
    hlo = compile_lowered(lowered, TARGET).hlo
    found = check_arguments(hlo, arguments_of(lowered, right.args), moves_of(hlo))[0]
    wrong = {each.name: each.problem for each in found if not each.ok}
    stacks = {each.name for each in compiled(2).arguments if each.layers and each.place == "host"}
    assert wrong.keys() == stacks
    assert set(wrong.values()) <= {
        "its layers are moved at once",
        "no asynchronous copy brings its layers one by one",
    }


def test_an_array_that_is_elsewhere_or_not_in_place_is_named():
    """The same program, of which other things are asked; and the same text with another result in the place of one."""
    found = compiled(2)
    turned = tuple(dataclasses.replace(each, place="device") if each.layers else each for each in found.arguments)
    wrong = [each for each in check_arguments(found.memory.hlo, turned, ())[0] if not each.ok]
    assert {(each.asked, each.problem) for each in wrong if "runs" in each.name} == {("device", "is on host")}
    number = next(i for i, each in enumerate(found.arguments) if each.place == "host" and not each.layers)
    alias = f"{{{number}}}: ({number}, {{}}, may-alias), "
    assert alias in found.memory.hlo
    report = check_arguments(found.memory.hlo.replace(alias, "", 1), found.arguments, moves_of(found.memory.hlo))[0]
    (wrong_one,) = [each for each in report if not each.ok]
    assert wrong_one.name == found.arguments[number].name
    assert wrong_one.problem == "is not changed in place: there are two of it on the host"
    with pytest.raises(ValueError, match="arguments of other shapes"):
        check_arguments(found.memory.hlo, found.arguments[:-1], ())


def moves_of(hlo: str) -> list[Transfer]:
    return list(transfers(parse(hlo)))
