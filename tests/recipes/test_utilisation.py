"""Model FLOPs by published figures and by the products of the traced forward pass; memory of devices that say it."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import zoo
from recipes import schema
from recipes.plan.flops import work
from recipes.plan.targets import Target
from recipes.watch.summary import Device
from recipes.watch.utilisation import device_memory, known_target, training_flops
from recipes.watch.watching import figures
from tests import helpers
from tests.recipes.test_conf_files import composed

# Billions of operations a token at 4096 tokens: arXiv 2505.09343, table 2.
PUBLISHED = {"deepseek_v2": 155, "deepseek_v3_671b": 250}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_a_token_takes_what_was_published(name: str, billions: int):
    assert round(training_flops(zoo.abstract(name), 4096) / 1e9) == billions


def test_a_dense_forward_pass_has_the_products_that_are_counted():
    """One of 32 tokens computes the whole square of attention, of which the causal half counts."""
    batch, seq = 2, 32
    for overrides in ({}, {"tied_embeddings": False}):
        model = zoo.abstract("debug_llama", **overrides)
        traced = jax.make_jaxpr(lambda model, tokens: model(tokens))(model, jnp.zeros((batch, seq), jnp.int32))
        attention = model.layers.blocks[0].attention
        head_dims = attention.query_proj.weight.shape[1] + attention.out_proj.weight.shape[0]
        beyond = len(model.layers.blocks) * head_dims * (2 * seq - (seq + 1))
        expected = batch * seq * (training_flops(model, seq) / 3 + beyond)
        assert work(traced).flops == pytest.approx(expected, rel=helpers.FLOAT64)


def test_more_experts_take_no_more_but_for_the_router():
    few, many = (zoo.abstract("debug_deepseek", num_experts=count) for count in (8, 16))
    moe = sum(hasattr(block, "moe") for block in few.layers.blocks)
    router = few.layers.blocks[-1].moe.router.weight
    difference = training_flops(many, 64) - training_flops(few, 64)
    assert difference == pytest.approx(3 * 2 * moe * router.shape[0] * 8, rel=helpers.FLOAT64)


def test_the_kind_of_a_device_names_its_target():
    for kind, name in {"NVIDIA H200": "h200", "NVIDIA GB200": "gb200", "TPU v6 lite": "tpu_v6e"}.items():
        target = known_target(kind)
        assert target is not None
        assert target.bf16_flops_per_s == Target.named(name).bf16_flops_per_s
    assert known_target("cpu") is None


def device(kind: str = "cpu", **stats: int) -> SimpleNamespace:
    return SimpleNamespace(platform=kind[:3], device_kind=kind, memory_stats=lambda: stats or None)


def test_memory_is_that_of_the_fullest_device_and_absent_where_devices_do_not_say():
    devices = [device(peak_bytes_in_use=3), device(peak_bytes_in_use=5, bytes_in_use=9)]
    assert device_memory(devices) == {"device_peak_bytes": 5}
    assert device_memory([device(), device(bytes_in_use=1)]) == {}
    assert device_memory() == {}  # the CPU has no figures


def test_figures_are_those_of_the_mesh_s_devices_where_their_kind_is_known():
    config = schema.read(composed("model=debug_llama", "mesh.fsdp=4", "train.sequence_length=64"))
    found = figures(config, device("NVIDIA H200", bytes_limit=2**37))
    flops = training_flops(zoo.abstract("debug_llama"), 64)
    assert found == Device(flops_per_token=flops, count=4, peak_flops_per_s=989.5e12, memory_bytes=2**37)
    frozen = dataclasses.replace(config, train=dataclasses.replace(config.train, freeze=("embedding",)))
    assert figures(frozen, device("NVIDIA H200")) is None
    assert figures(config, device("NVIDIA GT 710")) is None
    assert figures(config, jax.devices()[0]) is None
