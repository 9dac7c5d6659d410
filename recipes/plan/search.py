"""The largest batch, sequence or number of layers that fits, or the fewest devices, in a few compiles. Free of jax."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.plan.cases import Case
from recipes.plan.planned import PlanError
from recipes.plan.record import Plan
from zoo.checks import ConfigError

MAX_COMPILES = 8
_SEQUENCE_STEP = 1024  # tokens a device along `context`; a longer sequence that is no multiple of it is not tried
_FARTHEST = 4096  # times the smallest size
_STRIDE = 3  # at most so many times what fits: memory may grow faster than the line says, and compiling with it


@dataclass(frozen=True)
class Found:
    """What a search found: the best value that fits (None: none of those tried) and its plan.

    `exact`: the next value was planned too and does not fit. `tried`: all values planned, in order.
    """

    what: str
    value: int | None
    plan: Plan | None
    exact: bool
    tried: dict[int, Plan]


def search(what: str, case: Case, plan: Callable[[Case], Plan]) -> Found:
    """Searches along `batch`, `sequence`, `layers` or `devices` with at most eight calls of `plan`."""
    values, change = _axis(what, case)
    tried: dict[int, Plan] = {}

    def measure(index: int) -> Plan:
        value = values[index]
        tried[value] = dataclasses.replace(plan(change(value)), name=f"{case.name}, {what} {value}")
        return tried[value]

    start = min(range(len(values)), key=lambda index: abs(values[index] - _current(what, case)))
    try:
        best, exact = last_fitting(len(values), measure, start)
    except PlanError:  # too large to be compiled within the limits; what was found before stands
        if not tried:
            raise
        best, exact = max((values.index(value) for value, plan in tried.items() if plan.fits), default=None), False
    if best is None:
        return Found(what, None, None, exact, tried)
    return Found(what, values[best], tried[values[best]], exact, tried)


def last_fitting(count: int, measure: Callable[[int], Plan], start: int) -> tuple[int | None, bool]:
    """The last of `count` indices whose plan fits, where memory grows with the index; and whether that is certain.

    Memory is nearly linear: the next index tried is where the line through the two nearest plans meets the capacity.
    """
    seen: dict[int, Plan] = {}
    low, high, index = -1, count, min(max(start, 0), count - 1)
    while high - low > 1 and len(seen) < MAX_COMPILES:
        seen[index] = measure(index)
        low, high = (index, high) if seen[index].fits else (low, index)
        index = min(max(_meeting(seen, index), low + 1), high - 1, _STRIDE * (low + 1) + 1)
    return (low if low >= 0 else None), high - low <= 1


def _meeting(seen: dict[int, Plan], index: int) -> int:
    """Where the memory that runs out first is full, by the last plan and the one before it, or by doubling."""
    if len(seen) < 2:
        return 2 * index + 1 if seen[index].fits else index // 2
    (a, first), (b, second) = list(seen.items())[-2:]
    limits = []
    for used, capacity in (
        (lambda plan: plan.device_peak_bytes, second.target.usable_bytes),
        (lambda plan: plan.host_bytes, second.target.host_bytes),
    ):
        slope = (used(second) - used(first)) / (b - a)
        if slope > 0:
            limits.append(int(b + (capacity - used(second)) / slope))
    return min(limits, default=2 * b + 1)


def _current(what: str, case: Case) -> int:
    current = {
        "batch": case.config.train.batch_size,
        "sequence": case.config.train.sequence_length,
        "layers": case.config.model.num_layers,
        "devices": case.target.devices,
    }
    return current[what]


def _axis(what: str, case: Case) -> tuple[Sequence[int], Callable[[int], Case]]:
    """Values in the order in which memory grows, and the case with one of them."""
    mesh, train = case.config.mesh, case.config.train
    if what == "batch":
        step = mesh.replica * mesh.fsdp * mesh.expert * train.accumulate
        return range(step, _FARTHEST * step + 1, step), lambda value: case.with_train(batch_size=value)
    if what == "sequence":
        step = _SEQUENCE_STEP * mesh.context
        return range(step, _FARTHEST * step + 1, step), lambda value: case.with_train(sequence_length=value)
    if what == "layers":
        fewest = getattr(case.config.model, "num_dense_layers", 0) + 1
        return range(fewest, _FARTHEST), lambda value: case.with_model(num_layers=value)
    sizes = {size * mesh.num_devices // mesh.fsdp: size for size in _fsdp_sizes(case)}
    if not sizes:
        raise ConfigError("plan.minimise", what, "no size of mesh.fsdp divides the batch and the hosts")
    return sorted(sizes, reverse=True), lambda value: case.with_fsdp(sizes[value])


def _fsdp_sizes(case: Case) -> list[int]:
    """Sizes of `fsdp` that divide the micro-batch and make whole hosts."""
    mesh, train, found = case.config.mesh, case.config.train, []
    rest = mesh.num_devices // mesh.fsdp
    micro = train.batch_size // train.accumulate
    for size in range(1, micro + 1):
        devices = size * rest
        whole = devices <= case.target.devices_per_host or devices % case.target.devices_per_host == 0
        if whole and micro % (mesh.replica * size * mesh.expert) == 0 and case.target.platform == "cuda":
            found.append(size)
    return found
