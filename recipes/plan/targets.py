"""Hardware that a step is compiled for. Free of jax."""

from dataclasses import dataclass

from zoo import presets
from zoo.checks import require_positive


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the compiler needs to know of one GPU; sources of the figures stand in `conf/target/NAME.yaml`."""

    name: str
    device_name: str
    compute_capability: str
    core_count: int
    clock_ghz: float
    l2_bytes: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_bytes: int
    hbm_bytes: int
    hbm_bytes_per_s: float

    def __post_init__(self):
        require_positive("target", self, "core_count", "clock_ghz", "l2_bytes", "hbm_bytes", "hbm_bytes_per_s")

    @classmethod
    def named(cls, name: str) -> "Target":
        """The target of `conf/target/NAME.yaml`. Raises ConfigError for an unknown name."""
        _, fields = presets.read("target", name, "target")
        fields["hbm_bytes_per_s"] = float(fields["hbm_bytes_per_s"])  # YAML reads 4.8e12 as a word
        return cls(**fields)

    def xla_config(self) -> str:
        """The target as XLA's `GpuTargetConfigProto`, text format."""
        major, minor = self.compute_capability.split(".")
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core_bytes}
  shared_memory_per_block_optin: {self.shared_memory_per_block_bytes}
  threads_per_core_limit: 2048
  core_count: {self.core_count}
  fpus_per_core: 128
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
  cuda_compute_capability {{ major: {major} minor: {minor} }}
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
