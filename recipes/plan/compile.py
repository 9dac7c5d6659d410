"""Compiling a program for a device that is not there, and reading how much memory it takes, and where."""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from recipes.flags import compiler_options
from recipes.placement.hosted import DEVICE_KIND, HOST_KIND, abstract, on_host, place_of
from recipes.plan.buffers import DUMP_OPTIONS, Peak, read_peaks
from recipes.plan.targets import Target

Options = Mapping[str, str | bool | int]
EXTRAS = {"cuda": "plan-cuda", "tpu": "plan-tpu"}


class MissingPlugin(RuntimeError):
    """No compiler for the target's platform is installed; the message says which extra brings it."""


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes on one device of the target, from XLA's buffer assignment.

    `device_peak_bytes` is arguments + temporaries + outputs - what outputs share with donated arguments, and so is
    `host_bytes` of what is on the host.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_alias_bytes: int
    host_temp_bytes: int
    compile_s: float
    hlo: str

    @property
    def device_peak_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_argument_bytes + self.host_temp_bytes + self.host_output_bytes - self.host_alias_bytes


@dataclass(frozen=True)
class Compiled:
    """A compiled program: what was traced, its memory, and what is in it at its fullest (`(device, host)`)."""

    program: ClosedJaxpr
    memory: CompiledMemory
    peaks: tuple[Peak, Peak] | None


def compile_for(fn: Callable, *args: PyTree, target: Target, options: Options | None = None) -> CompiledMemory:
    """Compiles `fn` for the target, of which no device needs to be present; nothing is run.

    For one device; or, where `args` are `jax.ShapeDtypeStruct`s with shardings over `devices_of(target, count)`, for
    all of these, with the figures of one of them. `fn` is a function, or a jitted one such as
    `recipes.make_train_step(..., platform="cuda")`, whose donation and compiler options are kept; `options` come on
    top. `args` are PyTrees of arrays or `jax.ShapeDtypeStruct`s. Needs the plugin alone (the extra `plan-cuda` or
    `plan-tpu`), none of the CUDA libraries. Raises MissingPlugin without it.
    """
    lowered = lower_for(fn, *args, target=target)[1]
    return compile_lowered(lowered, target, options)


def compile_fully(fn: Callable, *args: PyTree, target: Target, options: Options | None = None) -> Compiled:
    """As `compile_for`, with the traced program and the arrays in memory at the peak."""
    traced, lowered = lower_for(fn, *args, target=target)
    with tempfile.TemporaryDirectory() as folder:
        memory = compile_lowered(lowered, target, {"xla_dump_to": folder, **DUMP_OPTIONS, **(options or {})})
        return Compiled(traced.jaxpr, memory, read_peaks(Path(folder)))


def trace_for(fn: Callable, *args: PyTree, target: Target) -> Any:
    """`fn` traced with abstract arguments on devices of the target."""
    one = NamedSharding(Mesh(np.array(devices_of(target)[:1]), ("device",)), PartitionSpec())

    def absent(leaf: Any) -> jax.ShapeDtypeStruct:
        given = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        return abstract(leaf, given or one, place_of(leaf))

    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn, compiler_options=compiler_options(target.compiler))
    return jitted.trace(*jax.tree.map(absent, args))


def lower_for(fn: Callable, *args: PyTree, target: Target) -> tuple[Any, Any]:
    """`(traced, lowered)` of `fn`, with the arguments that are abstract arrays on the host there."""
    traced = trace_for(fn, *args, target=target)
    lowered = traced.lower()
    if any(map(on_host, jax.tree.leaves(args))):
        _say_kinds(lowered, [on_host(leaf) for leaf in jax.tree.leaves(args)])
    return traced, lowered


def _say_kinds(lowered: Any, hosted: list[bool]) -> None:
    """Marks the program's arguments with their kinds of memory, which JAX drops where the device is absent."""
    from jaxlib.mlir import ir

    module = lowered.compiler_ir("stablehlo")
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])  # arguments that nothing reads are left out
    with module.context:
        main = next(each for each in module.body.operations if each.attributes["sym_name"].value == "main")
        marked = []
        for number, attributes in zip(kept, ir.ArrayAttr(main.arg_attrs), strict=True):
            found = dict(_items(ir.DictAttr(attributes)))
            found["mhlo.memory_kind"] = ir.StringAttr.get(HOST_KIND if hosted[number] else DEVICE_KIND)
            marked.append(ir.DictAttr.get(found))
        main.arg_attrs = ir.ArrayAttr.get(marked)


def _items(attributes: Any) -> Iterator[tuple[str, Any]]:
    for number in range(len(attributes)):
        yield attributes[number].name, attributes[number].attr


def compile_lowered(lowered: Any, target: Target, options: Options | None = None) -> CompiledMemory:
    """Compiles what `lower_for` gives."""
    start = time.perf_counter()
    with _without_persistent_cache():
        # Autotuning would need the device.
        base = {"xla_gpu_autotune_level": 0} if target.platform == "cuda" else {}
        compiled = lowered.compile(compiler_options={**base, **(options or {})})
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return CompiledMemory(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_argument_bytes=memory.host_argument_size_in_bytes,
        host_output_bytes=memory.host_output_size_in_bytes,
        host_alias_bytes=memory.host_alias_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        compile_s=seconds,
        hlo=str(compiled.as_text()),
    )


def devices_of(target: Target, count: int | None = None) -> list[Any]:
    """The devices of the target, or `count` of its kind, for a mesh to compile for.

    Raises MissingPlugin without the plugin, RuntimeError where it knows no such topology.
    """
    if target.platform == "local":
        return jax.devices()[: count or target.devices]
    target = target if count is None or count == target.devices else target.of(count)
    # Else the plugin looks for the CUDA libraries wherever JAX_PLATFORMS does not leave CUDA out.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks the cloud for the TPU that is not there
    with _quiet("jax._src.xla_bridge"):
        jax.devices()  # registers the plugins
        try:
            return list(_topology(target).devices)
        except Exception as error:
            if isinstance(error, NotImplementedError) or "not installed" in str(error):
                raise MissingPlugin(
                    f"cannot compile for {target.name}: the {target.platform.upper()} plugin is missing; "
                    f"pip install 'offload-zoo[{EXTRAS[target.platform]}]'"
                ) from error
            raise RuntimeError(f"no devices of {target.name} {target.grid}: {error}") from error


def _topology(target: Target) -> Any:
    if target.platform == "tpu":
        return topologies.get_topology_desc(target.grid, platform="tpu")
    options = {"target_config": target.xla_config(), "topology": target.grid}
    try:
        return topologies.get_topology_desc(target.name, platform="cuda", **options)
    except NotImplementedError:
        from jax._src import xla_bridge  # no public way to load a plugin that failed for want of CUDA's libraries

        xla_bridge.discover_pjrt_plugins()
        return topologies.get_topology_desc(target.name, platform="cuda", **options)


@contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """JAX would write what is compiled for an absent device to its cache, and then fail to read it."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """The plugin complains of the missing CUDA libraries, which compiling does not need."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
