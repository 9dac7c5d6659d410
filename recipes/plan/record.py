"""What a plan says: bytes by part, traffic, whether it fits. Free of jax: plans are kept and shown without it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.plan.targets import Target

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_HOST_LIMIT = 64 * 10**9  # of pinned memory a process, where the variable is not set


@dataclass(frozen=True)
class Traffic:
    """What one tag moves in a step on one device: bytes each way, and the seconds the link needs for them."""

    to_host_bytes: int
    to_device_bytes: int
    to_host_s: float
    to_device_s: float


@dataclass(frozen=True)
class Plan:
    """What a compile for a target says of one step on one of its devices.

    - `parts`, `host_parts`: bytes of the device's peak and of the host, by what they hold; both add up to the totals.
    - `traffic`: by tag. `forward_s`, `backward_s`: what the products of the layers take at the target's bf16 peak, the
      least they can; None where the program has no known layers. `flops`: of one device and step.
    - `places`: tag -> the place in each layer, for a picture. `notes`: what a reader should know.
    """

    name: str
    target: Target
    device_peak_bytes: int
    host_bytes: int
    parts: Mapping[str, int]
    host_parts: Mapping[str, int]
    traffic: Mapping[str, Traffic]
    flops: float
    forward_s: float | None
    backward_s: float | None
    compile_s: float
    places: Mapping[str, list[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    batch_size: int | None = None
    sequence_length: int | None = None
    num_layers: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the device's peak fits into its usable memory and the host bytes into the host's."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        return self.device_peak_bytes <= self.target.usable_bytes

    @property
    def fits_host(self) -> bool:
        return self.host_bytes <= self.target.host_bytes

    @property
    def unexplained(self) -> float:
        """The share of the device's peak that no part explains."""
        return abs(self.parts.get("unexplained", 0)) / max(1, self.device_peak_bytes)

    @property
    def warnings(self) -> list[str]:
        """What must be set, or will go wrong."""
        found = []
        if not self.fits_host:
            found.append(f"the host has {_gib(self.target.host_bytes)} GiB a device, less than what is kept there")
        elif self.host_bytes and self.target.platform != "tpu":
            limit = math.ceil(self.host_bytes * self.target.devices_per_host / 10**9 * 1.02)
            default = "" if limit * 10**9 > _DEFAULT_HOST_LIMIT else " (the default of 64 suffices)"
            found.append(f"set {HOST_LIMIT}={limit} for one process a host{default}")
        return found

    def to_json(self) -> dict[str, Any]:
        """As `run.json` has it."""
        fields = dataclasses.asdict(self)
        target = fields.pop("target")
        return {
            "name": fields.pop("name"),
            "target": target["name"],
            "devices": target["devices"],
            "fits": self.fits,
            "device_peak_bytes": fields.pop("device_peak_bytes"),
            "device_capacity_bytes": self.target.usable_bytes,
            "host_bytes": fields.pop("host_bytes"),
            "host_capacity_bytes": self.target.host_bytes,
            **fields,
            "warnings": self.warnings,
        }

    def stored(self) -> dict[str, Any]:
        """All fields, for `restored`."""
        return dataclasses.asdict(self)

    @classmethod
    def restored(cls, fields: Mapping[str, Any]) -> "Plan":
        """Inverse of `stored`, through JSON too."""
        traffic = {tag: Traffic(**each) for tag, each in fields["traffic"].items()}
        more = {"traffic": traffic, "target": Target(**fields["target"]), "notes": tuple(fields["notes"])}
        return cls(**{**fields, **more})


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"
