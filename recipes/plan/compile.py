"""Compiling a program for a GPU that is not there, and reading how much memory it takes, and where."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from recipes.flags import compiler_options
from recipes.plan.targets import Target


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes on one device of the target, from XLA's buffer assignment.

    `device_peak_bytes` is arguments + temporaries + outputs - what outputs share with donated arguments.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_temp_bytes: int
    compile_s: float
    hlo: str

    @property
    def device_peak_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


def compile_for(fn: Callable, *args: PyTree, target: Target) -> CompiledMemory:
    """Compiles `fn` for the target, of which no device needs to be present; nothing is run.

    For one device; or, where `args` are `jax.ShapeDtypeStruct`s with shardings over `devices_of(target, count)`, for
    all of these, with the figures of one of them. `fn` is a function, or a jitted one such as
    `recipes.make_train_step(..., platform="cuda")`, whose donation and compiler options are kept. `args` are PyTrees of
    arrays or `jax.ShapeDtypeStruct`s. Needs the CUDA plugin alone (the extra `plan-cuda`), none of the CUDA libraries.
    Raises RuntimeError where the plugin is missing.
    """
    one = NamedSharding(Mesh(np.array(devices_of(target)), ("device",)), PartitionSpec())

    def absent(leaf: Any) -> jax.ShapeDtypeStruct:
        given = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given or one)

    abstract = jax.tree.map(absent, args)
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn, compiler_options=compiler_options("cuda"))
    start = time.perf_counter()
    with _without_persistent_cache():
        # Autotuning would need the device.
        compiled = jitted.lower(*abstract).compile(compiler_options={"xla_gpu_autotune_level": 0})
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return CompiledMemory(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        compile_s=seconds,
        hlo=str(compiled.as_text()),
    )


def devices_of(target: Target, count: int = 1) -> list[Any]:
    """That many devices of the target, for a mesh to compile for. Raises RuntimeError where the plugin is missing."""
    from jax._src import xla_bridge  # no public way to load a plugin whose platform is not in use

    # Else the plugin looks for the CUDA libraries wherever JAX_PLATFORMS does not leave CUDA out.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    with _quiet("jax._src.xla_bridge"):
        xla_bridge.discover_pjrt_plugins()
        try:
            topology = topologies.get_topology_desc(
                target.name, platform="cuda", target_config=target.xla_config(), topology=f"1x1x{count}"
            )
        except Exception as error:
            raise RuntimeError(
                f"cannot compile for {target.name}: the CUDA plugin is missing; pip install 'offload-zoo[plan-cuda]'"
            ) from error
    return list(topology.devices)


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
