"""Hardware that is not there: its description, the compiler's options, and what is said where the plugin is missing."""

import dataclasses
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipes.flags import compiler_options
from recipes.plan.compile import compile_for, devices_of
from recipes.plan.local import described
from recipes.plan.targets import Target
from zoo import presets
from zoo.checks import ConfigError

NAMES = [name for name in presets.names("target") if name != "local"]


def test_the_h200():
    """NVIDIA's data sheet: 132 SMs, 4.8 TB/s; 141 GB, of which the driver shows 143771 MiB."""
    target = Target.named("h200")
    assert (target.core_count, target.compute_capability) == (132, "9.0")
    assert target.hbm_bytes == 143771 * 2**20
    assert target.hbm_bytes_per_s == 4.8e12


def test_the_compiler_is_told_of_the_target():
    text = Target.named("h200").xla_config()
    for line in ("core_count: 132", "memory_bandwidth: 4800000000000", "device_memory_size: 150754820096"):
        assert f"  {line}\n" in text
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "{ major: 8 minor: 0 feature_extension: NONE }" in Target.named("a100_80g").xla_config()


def test_an_unknown_target_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"(?s)target=h20: no such target.*did you mean h200"):
        Target.named("h20")


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_where_it_comes_from(name: str):
    text = resources.files("conf").joinpath("target", f"{name}.yaml").read_text()
    plain = ("name", "platform", "defaults")
    bare = [line for line in text.splitlines() if "#" not in line and line.split(":")[0] not in plain]
    assert not bare
    target = Target.named(name)
    assert target.name == name
    assert target.usable_bytes < target.hbm_bytes


def test_the_link_of_a_gb200():
    """900 GB/s of NVLink-C2C count both directions and serve two GPUs: 225 GB/s a way, 170 to 210 seen in practice."""
    target = Target.named("gb200")
    assert target.to_host_bytes_per_s == target.to_device_bytes_per_s == 900e9 / 2 / 2


@pytest.mark.parametrize(
    ("name", "devices", "topology", "grid"),
    [
        ("gb200", 128, None, "1x32x4"),
        ("gb200", 2, None, "1x1x2"),
        ("h200", 8, "1x2x4", "1x2x4"),
        ("tpu_v5p", 8, "v5p:2x2x2", "v5p:2x2x2"),
    ],
)
def test_topologies(name: str, devices: int, topology: str | None, grid: str):
    fields = {"devices": devices} | ({} if topology is None else {"topology": topology})
    assert dataclasses.replace(Target.named(name), **fields).grid == grid


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gb200", {"devices": 6}, "target.devices=6: is not a whole number of hosts of 4"),
        ("gb200", {"devices": 8, "topology": "2x2"}, "target.topology=2x2: must be slices x hosts"),
        ("gb200", {"devices": 8, "topology": "1x4x4"}, "target.devices=8: .* has 16 devices"),
        ("tpu_v5p", {"devices": 8}, "target.devices=8: target.topology=v5p:2x2x1 has 4 devices"),
        ("tpu_v6e", {"topology": None}, "target.topology=None: must be a kind and a grid"),
        ("h200", {"core_count": None}, "target.core_count=None: XLA compiles"),
        ("h200", {"usable_fraction": 1.5}, "target.usable_fraction=1.5: must be at most 1"),
        ("h200", {"host_bytes": 0}, "target.host_bytes=0: must be above zero"),
        ("h200", {"compute_capability": "nine"}, "target.compute_capability=nine"),
        ("h200", {"platform": "cpu"}, "target.platform=cpu"),
    ],
)
def test_what_no_target_can_be(name: str, fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(Target.named(name), **fields)


@pytest.mark.parametrize("name", ["a100_80g", "gb200", "vr200"])
def test_products_compile_for_every_architecture(name: str):
    """On two devices; Hopper's are compiled for in many other tests."""
    target = Target.named(name)
    mesh = Mesh(np.array(devices_of(target, 2)), ("data",))
    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))
    memory = compile_for(lambda x: x.T @ x, x, target=target)
    assert (memory.argument_bytes, memory.output_bytes) == (64 * 32 * 2 // 2, 32 * 32 * 2)


def test_the_device_at_hand_is_the_target_of_its_name_with_its_own_memory():
    target = described("NVIDIA H200", {"bytes_limit": 100 * 2**30}, 2)
    assert (target.name, target.platform, target.devices) == ("local", "local", 2)
    assert target.usable_bytes == 100 * 2**30
    assert target.to_host_bytes_per_s == Target.named("h200").to_host_bytes_per_s
    with pytest.raises(ConfigError, match=r"(?s)target=local: no target describes a 'cpu'.*NVIDIA H200"):
        described("cpu", {}, 1)


def test_options_by_platform():
    """Loops of one trip stay loops and XLA's own rematerialisation stays away; the CPU needs neither."""
    assert compiler_options("cpu") == compiler_options() == {}
    for platform in ("cuda", "gpu", "tpu"):
        passes = compiler_options(platform)["xla_disable_hlo_passes"]
        assert passes == "rematerialization,simplify-while-loops"
    assert compiler_options("gpu") == compiler_options("cuda")
    assert compiler_options("cuda")["xla_gpu_enable_pipelined_host_offloading"] is False
    assert compiler_options("metal") == {}
    compiler_options("cuda")["xla_disable_hlo_passes"] = ""
    assert compiler_options("cuda")["xla_disable_hlo_passes"] != ""


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no such platform")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(RuntimeError, match=r"cannot compile for h200: .*pip install 'offload-zoo\[plan-cuda\]'"):
        compile_for(jnp.sin, jax.ShapeDtypeStruct((2,), jnp.float32), target=Target.named("h200"))
