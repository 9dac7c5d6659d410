"""The mesh of a run. Free of jax."""

import math
from dataclasses import dataclass, fields
from typing import Any

from zoo.checks import ConfigError, require_positive

AXES = ("replica", "fsdp", "expert", "tensor", "context")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis of the mesh has; their product is the number of devices.

    - `replica`: copies of everything; the batch is split.
    - `fsdp`: the batch, parameters, gradients and moments are split (ZeRO 3).
    - `expert`: as `fsdp`, and routed experts are split by number.
    - `tensor`: heads, hidden dims and vocabulary are split.
    - `context`: the sequence is split.
    - `slices`: groups of devices (TPU slices, or processes) that slower links join. The batch alone is split over them:
      `replica` as far as it goes, then `fsdp`.
    - `zero`: what `fsdp` and `expert` split besides the batch: 3 all of it, 2 no parameters, 1 no gradients either
      (arXiv 1910.02054); each device then computes with whole parameters and need not gather them layer by layer.
    - `expert_bound`: along `expert`, a device sends at most that many times the mean load to an expert.
    """

    replica: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    context: int = 1
    slices: int = 1
    zero: int = 3
    expert_bound: float = 2.0

    def __post_init__(self):
        require_positive("mesh", self, *(field.name for field in fields(self)))
        if self.zero not in (1, 2, 3):
            raise ConfigError("mesh.zero", self.zero, "must be 1, 2 or 3")
        if self.fsdp % (self.slices // math.gcd(self.replica, self.slices)):
            problem = f"does not divide replica x fsdp = {self.replica} x {self.fsdp}, which are split over slices"
            raise ConfigError("mesh.slices", self.slices, problem)

    def __str__(self) -> str:
        """`fsdp=4 x tensor=2`."""
        return " x ".join(f"{name}={size}" for name, size in self.shape.items() if size > 1) or "1"

    @property
    def shape(self) -> dict[str, int]:
        """Axis -> devices."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape.values())

    def require_processes(self, processes: int) -> None:
        """Raises ConfigError if there are more processes than the mesh has devices, or some would have fewer."""
        if self.num_devices % processes:
            problem = f"the mesh has {self.num_devices} devices ({self}), which {processes} processes cannot share"
            raise ConfigError("train.distributed.processes", processes, problem)

    def require_batch(self, batch_size: int, sequence_length: int, accumulate: int) -> None:
        """Raises ConfigError unless the devices that split a micro-batch can do so evenly."""
        micro = batch_size // accumulate
        split = self.replica * self.fsdp * self.expert
        if micro % split:
            problem = f"a micro-batch of {micro} sequences is not divisible by replica x fsdp x expert = {split}"
            raise ConfigError("train.batch_size", batch_size, problem)
        if sequence_length % self.context:
            problem = f"is not divisible by mesh.context={self.context}"
            raise ConfigError("train.sequence_length", sequence_length, problem)

    def require_heads(self, model: Any) -> None:
        """Raises ConfigError if `tensor` would cut through a head or `expert` through an expert."""
        for axis, name in (("tensor", "num_heads"), ("tensor", "num_kv_heads"), ("expert", "num_experts")):
            count = getattr(model, name, 0)
            if count % getattr(self, axis):
                problem = f"does not divide model.{name}={count}"
                raise ConfigError(f"mesh.{axis}", getattr(self, axis), problem)
