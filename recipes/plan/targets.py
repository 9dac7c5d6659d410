"""Hardware that a step is compiled for. Free of jax."""

import dataclasses
import math
import re
from dataclasses import dataclass

from zoo import presets
from zoo.checks import ConfigError, from_fields, require_choice, require_positive

_COMPILER = (
    "device_name",
    "compute_capability",
    "core_count",
    "fpus_per_core",
    "clock_ghz",
    "l2_bytes",
    "shared_memory_per_core_bytes",
    "shared_memory_per_block_bytes",
)
_TPU_CORES = {"v2": 2, "v3": 2}  # devices a chip; newer chips are one device each


@dataclass(frozen=True, kw_only=True)
class Target:
    """One device, its host and its neighbours; sources of the figures stand in `conf/target/NAME.yaml`.

    - `platform`: `cuda`, `tpu`, or `local`: the devices at hand, whose kind names the target with the figures
      (`recipes.plan.local`). `devices`: how many there are. `topology`: slices x hosts x devices a host of a
      `cuda` target, by default as few hosts as hold the devices; of a `tpu` target its kind and grid, `v5p:2x2x1`.
    - `hbm_bytes`: what the driver shows; `usable_fraction` of them is left to the program (beside the runtime's own
      memory and that of collectives): what XLA_PYTHON_CLIENT_MEM_FRACTION is to be set to.
    - `host_bytes`: memory of the host, each device its share; `to_host_bytes_per_s`, `to_device_bytes_per_s`: of the
      link between them, for one device while all of the host copy, both ways at once.
    - `bf16_flops_per_s`, `fp8_...`, `fp4_...`: dense peaks of matrix products; null: the device has none.
    - `devices_per_host`, `devices_per_domain`: devices of a host, and those that NVLink or ICI joins.
    - `device_name`: what JAX calls the device. It and the rest are what XLA's GPU compiler is told (`cuda` only).
    """

    name: str
    platform: str = "cuda"
    devices: int = 1
    topology: str | None = None
    hbm_bytes: int
    hbm_bytes_per_s: float
    usable_fraction: float
    host_bytes: int
    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    devices_per_host: int
    devices_per_domain: int
    device_name: str | None = None
    compute_capability: str | None = None
    core_count: int | None = None
    fpus_per_core: int | None = None
    clock_ghz: float | None = None
    l2_bytes: int | None = None
    shared_memory_per_core_bytes: int | None = None
    shared_memory_per_block_bytes: int | None = None

    def __post_init__(self):
        require_choice("target.platform", self.platform, ("cuda", "tpu", "local"))
        for field in dataclasses.fields(self):
            if isinstance(getattr(self, field.name), int | float):
                require_positive("target", self, field.name)
        if self.usable_fraction > 1:
            raise ConfigError("target.usable_fraction", self.usable_fraction, "must be at most 1")
        if self.platform == "cuda":
            for name in _COMPILER:
                if getattr(self, name) is None:
                    raise ConfigError(f"target.{name}", None, "XLA compiles for no cuda device without it")
            if not re.fullmatch(r"\d+\.\d", self.compute_capability or ""):
                raise ConfigError("target.compute_capability", self.compute_capability, 'must be like "9.0"')
            self._require_hosts()
        elif self.platform == "tpu":
            self._require_grid()

    @classmethod
    def named(cls, name: str) -> "Target":
        """The target of `conf/target/NAME.yaml`. Raises ConfigError for an unknown name."""
        _, fields = presets.read("target", name, "target")
        for field in dataclasses.fields(cls):
            if "float" in str(field.type) and isinstance(fields.get(field.name), str):
                fields[field.name] = float(fields[field.name])  # YAML reads 4.8e12 as a word
        return from_fields(cls, fields, "target")

    def of(self, devices: int) -> "Target":
        """The same hardware with so many devices, in the default topology. Raises ConfigError if that cannot be."""
        return dataclasses.replace(self, devices=devices, topology=self.topology if self.platform == "tpu" else None)

    @property
    def compiler(self) -> str | None:
        """Whose compiler options a step carries; None: those of the devices at hand."""
        return None if self.platform == "local" else self.platform

    @property
    def usable_bytes(self) -> int:
        """HBM that the program may fill."""
        return int(self.hbm_bytes * self.usable_fraction)

    @property
    def grid(self) -> str:
        """The topology as JAX takes it: slices x hosts x devices a host, or the kind and grid of TPU chips."""
        if self.topology is not None:
            return self.topology
        hosts = max(1, self.devices // self.devices_per_host)
        return f"1x{hosts}x{self.devices // hosts}"

    def _require_hosts(self) -> None:
        if self.topology is None:
            if self.devices > self.devices_per_host and self.devices % self.devices_per_host:
                problem = f"is not a whole number of hosts of {self.devices_per_host}"
                raise ConfigError("target.devices", self.devices, problem, hint="or say target.topology=SLICESxHOSTSxN")
            return
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", self.topology):
            raise ConfigError("target.topology", self.topology, "must be slices x hosts x devices a host, as 1x32x4")
        self._require_product(self.topology, 1)

    def _require_grid(self) -> None:
        found = re.fullmatch(r"(v\w+):([1-9]\d*(x[1-9]\d*)*)", self.topology or "")
        if found is None:
            raise ConfigError("target.topology", self.topology, "must be a kind and a grid of chips, as v5p:2x2x1")
        self._require_product(found[2], _TPU_CORES.get(found[1], 1))

    def _require_product(self, sizes: str, cores: int) -> None:
        count = math.prod(int(size) for size in sizes.split("x")) * cores
        if count != self.devices:
            raise ConfigError("target.devices", self.devices, f"target.topology={self.topology} has {count} devices")

    def xla_config(self) -> str:
        """A `cuda` target as XLA's `GpuTargetConfigProto`, text format."""
        major, minor = (self.compute_capability or "0.0").split(".")
        extension = "ACCELERATED_FEATURES" if int(major) >= 9 else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core_bytes}
  shared_memory_per_block_optin: {self.shared_memory_per_block_bytes}
  threads_per_core_limit: 2048
  core_count: {self.core_count}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {self.hbm_bytes_per_s:.0f}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.hbm_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  name: "{self.device_name}"
  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.device_name}"
"""
