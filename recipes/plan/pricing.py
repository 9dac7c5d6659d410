"""The price of a program on hardware that is not there: memory by part, traffic, and the work to hide it behind."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from recipes.config import Config
from recipes.plan.compile import Compiled, Options, compile_fully, devices_of
from recipes.plan.flops import work
from recipes.plan.known import forward_loops, kept_anywhere, known_of
from recipes.plan.memory import Known, split_device, split_host, state_bytes
from recipes.plan.record import Plan
from recipes.plan.targets import Target
from recipes.plan.traffic import Moved, moved_activations, moved_state, traffic
from recipes.setup import Setup


def price(fn: Callable, *args: PyTree, target: Target, name: str = "", options: Options | None = None) -> Plan:
    """Compiles `fn(*args)` for the target and says where its memory goes; nothing is run.

    `fn` is any function or jitted function, `args` PyTrees of arrays or `jax.ShapeDtypeStruct`s, with shardings over
    `recipes.plan.compile.devices_of(target)` if there are several devices. Tags are found by their names
    (`jax.ad_checkpoint.checkpoint_name`) in scans. `options` are compiler options on top of the function's own.
    Raises MissingPlugin without the target's compiler.
    """
    compiled = compile_fully(fn, *args, target=target, options=options)
    done = work(compiled.program)
    found = _split(compiled, {"arguments": compiled.memory.argument_bytes}, Known(kept_anywhere(done)))
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    devices = max((len(sharding.device_set) for sharding in shardings if sharding is not None), default=1)
    flops = done.flops / devices
    return _plan(
        name or getattr(fn, "__name__", "program"),
        target,
        compiled,
        found,
        flops=flops,
        moved=moved_activations(found[1]),
    )


def price_step(config: Config, target: Target, name: str, options: Options | None = None) -> Plan:
    """The plan of the very step that `zoo-train` would run with this configuration on the target.

    Raises ConfigError where the configuration does not fit the target, MissingPlugin without the target's compiler.
    """
    setup = Setup(config, devices_of(target), target.compiler)
    state, batch = setup.abstract_state(), setup.abstract_batch()
    shape = {
        "places": _places(setup),
        "notes": _notes(config, setup, target),
        "batch_size": config.train.batch_size,
        "sequence_length": config.train.sequence_length,
        "num_layers": len(setup.table.layers),
    }
    try:
        compiled = compile_fully(setup.step, state, batch, target=target, options=options)
    except jax.errors.JaxRuntimeError as error:
        return _too_large(name, target, error, shape)
    done = work(compiled.program)
    arguments, hosted = state_bytes(state, "device"), state_bytes(state, "host")
    arguments["batch and counters"] = compiled.memory.argument_bytes - sum(arguments.values())
    found = _split(compiled, arguments, known_of(setup, state, done), hosted)
    moved = moved_activations(found[1], config.train.accumulate) | moved_state(setup, state)
    if "parameters" in moved:
        shape["notes"] = (*shape["notes"], _exposed(moved["parameters"][1], target))
    forward, backward = (sum(loop.flops for loop in loops) for loops in forward_loops(setup, state, done))
    count = target.devices
    return _plan(
        name,
        target,
        compiled,
        found,
        flops=done.flops / count,
        forward_s=forward / count / target.bf16_flops_per_s,
        backward_s=backward / count / target.bf16_flops_per_s or None,
        moved=moved,
        **shape,
    )


def _too_large(name: str, target: Target, error: Exception, shape: dict[str, Any]) -> Plan:
    """The plan of what libtpu refuses to compile because it does not fit; raises other errors again."""
    found = re.search(r"\(([\d.]+)G\) exceeds available HBM", str(error))
    if found is None:
        raise error
    peak = max(int(float(found[1]) * 2**30), target.usable_bytes + 1)
    shape["notes"] = (*shape["notes"], "libtpu compiles nothing that does not fit, and says of it one figure alone")
    parts = {"unexplained": peak}
    return Plan(name, target, peak, 0, parts, {}, {}, 0.0, None, None, 0.0, **shape)


def _split(
    compiled: Compiled, arguments: dict[str, int], known: Known, hosted: dict[str, int] | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    memory = compiled.memory
    device, host = compiled.peaks if compiled.peaks is not None else (None, None)
    hosted = {"arguments": memory.host_argument_bytes} if hosted is None else hosted
    hosted = hosted | {"outputs": memory.host_output_bytes - memory.host_alias_bytes}
    host_parts = split_host(memory.host_bytes, hosted, host, known)
    arguments = arguments | {"outputs": memory.output_bytes - memory.alias_bytes}
    return split_device(memory.device_peak_bytes, arguments, device, known.without(host_parts)), host_parts


def _plan(
    name: str,
    target: Target,
    compiled: Compiled,
    parts: tuple[dict[str, int], dict[str, int]],
    *,
    flops: float,
    moved: Moved,
    forward_s: float | None = None,
    backward_s: float | None = None,
    **more: Any,
) -> Plan:
    memory = compiled.memory
    return Plan(
        name=name,
        target=target,
        device_peak_bytes=memory.device_peak_bytes,
        host_bytes=memory.host_bytes,
        parts=parts[0],
        host_parts=parts[1],
        traffic=traffic(moved, target),
        flops=flops,
        forward_s=forward_s,
        backward_s=backward_s,
        compile_s=memory.compile_s,
        **more,
    )


def _places(setup: Setup) -> dict[str, list[str]]:
    """Tag -> its place in each layer; `-` where no place has an effect, nothing where the layer has no such tag."""
    tags = dict.fromkeys(tag for row in setup.table.layers for tag in row)
    cells = {tag: [row.get(tag) for row in setup.table.layers] for tag in tags}
    return {tag: ["" if cell is None else cell.place or "-" for cell in row] for tag, row in cells.items()}


def _exposed(fetched_bytes: int, target: Target) -> str:
    """In the compiled loops the copies of a layer start at its beginning, side by side with its first products."""
    milliseconds = fetched_bytes / target.to_device_bytes_per_s * 1000
    return (
        "parameters on the host are fetched within their layer, in both passes, not a layer ahead: the products wait "
        f"for the first of them, at most {milliseconds:,.0f} ms in a step"
    )


def _notes(config: Config, setup: Setup, target: Target) -> tuple[str, ...]:
    notes = ["attention compiled: this project's own, linear in memory, in plain XLA (no vendor kernel)"]
    if target.platform == "tpu":
        notes.append("libtpu names few of its temporaries: most of them stand under unexplained")
    if any("moe_gate" in row for row in setup.table.layers):
        notes.append("experts compiled: a scan over blocks of rows, in plain XLA (no grouped-matmul kernel)")
        if config.mesh.expert > 1:
            bound = getattr(config.model, "capacity_factor", None) or config.mesh.expert_bound
            balanced = ": balanced routing, tokens x top-k rows and no more" if bound == 1 else ""
            notes.append(f"expert buffers: {bound:g} x the mean load (mesh.expert_bound){balanced}; more is dropped")
    return tuple(notes)
