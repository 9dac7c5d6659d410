"""Several processes as one run, under `jax.distributed`. Free of jax until they join."""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

from recipes.config import Distributed
from zoo.checks import ConfigError

FAILED, BAD_CONFIGURATION = 1, 2
LOST_S = 30  # a process that has not been heard of for so long is taken for dead
# What the engines say when another process is gone: JAX's service, Gloo (CPU), NCCL (GPU).
_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "gloo", "heartbeat", "coordination", "connection", "nccl")


def launcher(distributed: Distributed | str | None) -> Distributed | None:
    """How this process finds the others; None if it is alone.

    `auto` looks for what JAX's own variables, SLURM's `srun`, Open MPI and TPU pods tell each of several processes.
    """
    if isinstance(distributed, Distributed) or distributed is None:
        return distributed
    several = any(int(os.environ.get(name) or 1) > 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").count(",")
    return Distributed() if several or hosts or os.environ.get("JAX_COORDINATOR_ADDRESS") else None


def run_joined(command: str, distributed: Distributed, num_devices: int, job: Callable[[], int]) -> int:
    """Joins the other processes, then runs `job`; what it prints is seen of the first process alone.

    Returns only if all went well: a process that fails or misses another one says so and ends at once, so that none
    waits for it. Raises ConfigError if the processes cannot be joined, or have not `num_devices` devices, the mesh's.
    """
    process = _join(distributed, num_devices)
    try:
        if process.index:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of libraries too
        code = job()
    except BaseException as error:
        print(_describe(command, process, error), file=sys.stderr)
        code = BAD_CONFIGURATION if isinstance(error, ConfigError) else FAILED
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a regular exit would first wait for the others
    return code


def _join(distributed: Distributed, num_devices: int) -> Distributed:
    """What JAX found, complete."""
    import jax

    try:
        jax.distributed.initialize(
            distributed.coordinator,
            distributed.processes,
            distributed.index,
            heartbeat_timeout_seconds=LOST_S,
        )
    except (ValueError, RuntimeError) as error:
        problem = f"the processes cannot be joined: {str(error).splitlines()[0]}"
        hint = "give all of {coordinator:HOST:PORT,processes:N,index:I}, or start with srun or mpirun"
        raise ConfigError("train.distributed", _show(distributed), problem, hint=hint) from error
    found = replace(distributed, processes=jax.process_count(), index=jax.process_index())
    if jax.device_count() != num_devices:
        each = f"{found.processes} processes have {jax.device_count()} devices"
        problem = f"{each}, the mesh needs {num_devices}"
        hint = f"for example mesh.fsdp={jax.device_count()}"
        raise ConfigError("train.distributed", _show(found), problem, hint=hint)
    return found


def _show(distributed: Distributed) -> str:
    given = {name: value for name, value in vars(distributed).items() if value is not None}
    return "{" + ",".join(f"{name}:{value}" for name, value in given.items()) + "}"


def _describe(command: str, process: Distributed, error: BaseException) -> str:
    who = f"{command}: process {process.index} of {process.processes}"
    if isinstance(error, KeyboardInterrupt):
        return f"{who} was stopped"
    if isinstance(error, ConfigError):
        return f"{who}: {error}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, RuntimeError) and any(word.lower() in str(error).lower() for word in _LOST):
        return f"{who} lost another process and stops: {first}"
    return f"{''.join(traceback.format_exception(error))}{who} failed and stops"
