"""What would save most where nothing planned fits. Free of jax: estimates from the parts of a plan, not compiles."""

from typing import NamedTuple

from recipes.config import Config
from recipes.plan.record import Plan

_WITH_BATCH = ("activations", "recomputed", "dispatch", "on the way", "temporaries")
_WITH_DEVICES = ("parameters", "masters", "moments", "gradients", "copies of parameters")


class Change(NamedTuple):
    """An override, what it saves on a device by estimate, and of which memory."""

    override: str
    saved_bytes: int
    memory: str = "device"


def advice(plan: Plan, config: Config, count: int = 3) -> list[Change]:
    """The changes that would save most, the largest first."""
    changes = _of_host(plan) if not plan.fits_host else []
    if not plan.fits_device:
        changes += [*_of_device(plan, config), *_of_tags(plan)]
    return sorted((c for c in changes if c.saved_bytes > 0), key=lambda c: -c.saved_bytes)[:count]


def _of_tags(plan: Plan) -> list[Change]:
    """Tags kept on the device go to the host; two layers' arrays stay, on their way."""
    sizes: dict[str, int] = {}
    for part, size in plan.parts.items():
        kind, *names = part.split("/")
        if kind == "activations" and len(names) == 2:
            sizes[names[0]] = sizes.get(names[0], 0) + size
    layers = max(plan.num_layers or 1, 1)
    return [
        Change(f"placement.activations.{tag}=host", int(size * max(0, 1 - 2 / layers))) for tag, size in sizes.items()
    ]


def _of_device(plan: Plan, config: Config) -> list[Change]:
    train, mesh = config.train, config.mesh
    split = mesh.replica * mesh.fsdp * mesh.expert * train.accumulate
    working = sum(size for part, size in plan.parts.items() if part.startswith(_WITH_BATCH))
    changes = [Change(f"mesh.fsdp={2 * mesh.fsdp}", sum(plan.parts.get(part, 0) for part in _WITH_DEVICES) // 2)]
    if train.batch_size % (2 * split) == 0:
        changes.append(Change(f"train.batch_size={train.batch_size // 2}", working // 2))
        changes.append(Change(f"train.accumulate={2 * train.accumulate}", working // 2))
    if config.optimizer.moment_dtype == "float32":
        changes.append(Change("optimizer.moment_dtype=bfloat16", plan.parts.get("moments", 0) // 2))
    if train.dtype == "float32":
        changes.append(Change("train.dtype=bfloat16", working // 2))
    if mesh.expert > 1 and mesh.expert_bound > 1:
        buffers = sum(size for part, size in plan.parts.items() if part.startswith(("dispatch", "activations/moe")))
        changes.append(Change("mesh.expert_bound=1", int(buffers * (1 - 1 / mesh.expert_bound))))
    return changes


def _of_host(plan: Plan) -> list[Change]:
    return [
        Change(f"placement.activations.{tag}=remat", moved.to_host_bytes, "host") for tag, moved in plan.traffic.items()
    ]
