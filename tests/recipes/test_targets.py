"""Hardware that is not there: its description, the compiler's options, and what is said where the plugin is missing."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from recipes.flags import compiler_options
from recipes.plan.compile import compile_for
from recipes.plan.targets import Target
from zoo.checks import ConfigError


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
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text


def test_an_unknown_target_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"(?s)target=h20: no such target.*did you mean h200"):
        Target.named("h20")


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
