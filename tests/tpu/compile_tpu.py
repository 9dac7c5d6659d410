"""Small steps compiled for TPUs that are not there: `make test-tpu`, which installs libtpu (680 MB)."""

import dataclasses

import jax
import pytest

from recipes.plan.pricing import price_step
from recipes.plan.record import Plan
from recipes.plan.targets import Target
from tests.recipes.test_plan import WIDTHS, config_of

LAYERS, SEQ = 3, 128


def planned(target: Target, places: tuple[tuple[str, str], ...], batch: int) -> Plan:
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        return price_step(config_of(places, LAYERS, batch, SEQ, target.devices), target, "tpu")


@pytest.mark.parametrize(("name", "tag"), [("tpu_v5p", "mlp_gate"), ("tpu_v6e", "attn_query")])
def test_a_tag_on_the_host_is_exactly_its_bytes(name: str, tag: str):
    target = Target.named(name)
    batch = 2 * target.devices
    host, device = (planned(target, ((tag, place),), batch) for place in ("host", "device"))
    assert device.host_bytes == 0
    assert host.host_bytes == LAYERS * 2 * SEQ * WIDTHS[tag] * 2
    assert host.traffic[tag].to_host_s == host.host_bytes / target.to_host_bytes_per_s
    assert sum(host.host_parts.values()) == host.host_bytes
    for plan in (host, device):  # libtpu names few of its temporaries: what is unexplained is not bounded here
        assert sum(plan.parts.values()) == plan.device_peak_bytes


def test_another_topology_is_a_matter_of_two_fields():
    target = dataclasses.replace(Target.named("tpu_v5p"), devices=8, topology="v5p:2x2x2")
    plan = planned(target, (), 8)
    assert plan.target.devices == 8
    assert plan.fits
