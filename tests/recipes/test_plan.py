"""Plans of small steps for an H200 that is not there: parts that add up, and arithmetic that must hold."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.ad_checkpoint import checkpoint_name

import recipes
from recipes.config import Config, RunConfig, TrainConfig
from recipes.data.config import DataConfig
from recipes.plan.pricing import price_step
from recipes.plan.record import Plan
from recipes.plan.targets import Target
from recipes.sharding.config import MeshConfig
from tests import helpers
from zoo.llama.config import LlamaConfig

# Dims are multiples of 128, as a TPU tiles them: tests/tpu runs the same.
MODEL = LlamaConfig(vocab_size=128, dim=128, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=128, mlp_dim=256)
WIDTHS = {"attn_query": 256, "attn_key": 128, "attn_value": 128, "attn_out": 128, "mlp_gate": 256, "mlp_up": 256}
H200 = Target.named("h200")


def config_of(
    places: tuple[tuple[str, str], ...], layers: int = 3, batch: int = 2, seq: int = 128, fsdp: int = 1
) -> Config:
    """A bfloat16 step of a small Llama, all under remat but for the places given."""
    return Config(
        model=dataclasses.replace(MODEL, num_layers=layers),
        placement=recipes.Placement(activations=dict(places)),
        explain=False,
        mesh=MeshConfig(fsdp=fsdp),
        optimizer=recipes.OptimizerConfig(),
        data=DataConfig(source="synthetic"),
        train=TrainConfig(batch_size=batch, sequence_length=seq, dtype="bfloat16"),
        run=RunConfig(dir="runs"),
    )


@functools.cache
def planned(places: tuple[tuple[str, str], ...], *sizes: int) -> Plan:
    config = config_of(places, *sizes)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        return price_step(config, H200.of(config.mesh.num_devices), "plan", helpers.FEWER_KERNELS)


@settings(max_examples=10 if helpers.LONG else 1)  # an example compiles two steps
@given(tag=st.sampled_from(sorted(WIDTHS)), layers=st.integers(2, 4), batch=st.sampled_from([2, 4]))
def test_a_tag_on_the_host_is_exactly_its_bytes(tag: str, layers: int, batch: int):
    on_host, on_device = (planned(((tag, place),), layers, batch) for place in ("host", "device"))
    assert on_device.host_bytes == 0
    assert on_host.host_bytes == layers * batch * 128 * WIDTHS[tag] * 2
    assert sum(on_host.host_parts.values()) == on_host.host_bytes
    assert on_host.traffic[tag].to_host_bytes == on_host.traffic[tag].to_device_bytes == on_host.host_bytes
    assert on_host.traffic[tag].to_host_s == on_host.host_bytes / H200.to_host_bytes_per_s
    assert sum(size for part, size in on_device.parts.items() if part.startswith(f"activations/{tag}")) == (
        on_host.host_bytes
    )


def test_block_inputs_on_the_host_lower_the_peak_by_their_bytes():
    """Less what two layers' arrays take, on their way."""
    layer = 16 * 128 * 128 * 2
    remat, host = (planned(places, 32, 16) for places in ((), (("block_input", "host"),)))
    assert host.host_bytes == 32 * layer
    assert 30 * layer <= remat.device_peak_bytes - host.device_peak_bytes <= 32 * layer


@pytest.mark.parametrize("fsdp", [4])
def test_parts_add_up_and_explain_the_peak(fsdp: int):
    plan = planned((("mlp_gate", "device"), ("attn_query", "host")), 3, 4, 256, fsdp)
    assert sum(plan.parts.values()) == plan.device_peak_bytes
    assert plan.unexplained < 0.1
    # bfloat16 parameters, float32 masters and two float32 moments, each device its share but for norms.
    matrices = 2 * 128 * 128 + 3 * (2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 256)
    for part, item in {"parameters": 2, "masters": 4, "moments": 8}.items():
        assert plan.parts[part] == pytest.approx(item * matrices / fsdp, rel=0.02)
    assert plan.parts["activations/mlp_gate/0-2"] == 3 * 4 * 256 * 256 * 2 // fsdp
    assert plan.host_bytes == 3 * 4 * 256 * 256 * 2 // fsdp


def test_work_is_counted_in_products():
    """Forward: `2 x tokens x weights`, and attention's two products over each pair of positions it visits."""
    plan = planned(())
    weights = 3 * (2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 256)
    attention = 3 * 2 * 2 * (2 * 2 * 128 * 128 * 128)
    assert plan.forward_s == pytest.approx((2 * 256 * weights + attention) / H200.bf16_flops_per_s, rel=0.01)
    assert plan.forward_s is not None
    assert plan.backward_s is not None
    assert 2.5 < plan.backward_s / plan.forward_s < 4.5  # twice the forward's, and the forward's again


def test_any_function_can_be_priced():
    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, weight: Any) -> tuple[Any, None]:
            return jnp.sin(checkpoint_name(x @ weight, "product")), None

        body = jax.checkpoint(layer, policy=recipes.policy({"product": "host"}), prevent_cse=False)
        return jax.lax.scan(body, x, weights)[0].astype(jnp.float32).sum()

    weights, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 128, 128), (512, 128)))
    plan = recipes.plan.price(jax.grad(loss), weights, x, target=recipes.plan.Target.named("h200"))
    size = 8 * 512 * 128 * 2
    assert plan.host_bytes == plan.traffic["product"].to_host_bytes == size
    assert plan.parts["arguments"] == 2 * (math.prod(weights.shape) + math.prod(x.shape))
    assert plan.flops == 2 * 8 * 512 * 128 * 128 * 3  # forward, and two products backward


def test_a_plan_survives_the_disk():
    plan = planned(())
    assert Plan.restored(plan.stored()) == plan
