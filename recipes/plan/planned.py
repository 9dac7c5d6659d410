"""Plans made in a process of their own, and kept on disk by a fingerprint of all that they depend on. Free of jax."""

import dataclasses
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from recipes.plan.cases import Case
from recipes.plan.isolate import IsolatedError, isolated
from recipes.plan.record import Plan

_KERNELS = "kernels"  # XLA's own cache of compiled kernels: they take half of the time and none of the memory


class Limits(NamedTuple):
    """Of one compile: seconds, and bytes of memory of its process."""

    timeout_s: float
    memory_bytes: int


class Refused(NamedTuple):
    """A configuration that cannot be, found once the model was known: what the message says."""

    message: str


class PlanError(RuntimeError):
    """No plan: the message says what to do about it."""


def planned(case: Case, limits: Limits, folder: Path | None) -> Plan:
    """The plan of a case, from the folder if it is there. Raises PlanError where there is none."""
    kept = folder is not None and case.target.platform != "local"  # the fingerprint knows no device at hand
    path = None if folder is None or not kept else folder / f"{fingerprint(case)}.json"
    if path is not None and path.is_file():
        return dataclasses.replace(Plan.restored(json.loads(path.read_text())), name=case.name)
    kernels = None if folder is None else str(folder / _KERNELS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        result = isolated(_plan, case, kernels, timeout_s=limits.timeout_s, memory_bytes=limits.memory_bytes).result
    except IsolatedError as error:
        last = [line for line in error.log.splitlines() if line.strip()][-1:]
        hint = "plan.timeout_s and plan.memory_gib are its limits"
        raise PlanError("\n".join([f"{case.name}: the compile {error}", *last, hint])) from error
    if isinstance(result, Refused):
        raise PlanError(result.message)
    plan = Plan.restored(result)
    if path is not None:
        _write(path, json.dumps(plan.stored()))
    return plan


def fingerprint(case: Case) -> str:
    """Of model, placement, mesh, batch, optimizer, flags, target and versions, this project's sources included."""
    config = dataclasses.replace(case.config, explain=False)
    fields = {**dataclasses.asdict(config), "run": None, "kind": type(config.model).__name__}
    fields["data"] = config.data.arrays
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "optax", "equinox")}
    told = [fields, dataclasses.asdict(case.target), dict(case.options), versions, _sources()]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def _sources() -> str:
    """A digest of the project's own code."""
    digest = hashlib.sha256()
    for package in ("layers", "zoo", "recipes"):
        root = Path(__file__).parents[2] / package  # not by importing it, which would import jax
        for file in sorted(root.rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    """At once or not at all: two plans may end at the same time."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _plan(case: Case, kernels: str | None) -> dict[str, Any] | Refused:
    """In the process of its own: the plan's fields."""
    if case.target.platform != "local":
        os.environ["JAX_PLATFORMS"] = "cpu"  # a device at hand is neither needed nor to be held
    from recipes.plan.compile import MissingPlugin
    from recipes.plan.local import at_hand
    from recipes.plan.pricing import price_step
    from zoo.checks import ConfigError

    options = dict(case.options)
    if kernels is not None and case.target.platform == "cuda":
        options = {"xla_gpu_kernel_cache_file": kernels, **options}
    try:
        target = at_hand(case.target) if case.target.platform == "local" else case.target
        return price_step(case.config, target, case.name, options).stored()
    except (ConfigError, MissingPlugin) as error:
        return Refused(str(error))
