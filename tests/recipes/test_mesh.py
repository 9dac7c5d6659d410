"""Making a mesh, what it may split, and attention along `context` by itself."""

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import zoo
from layers import Linear
from layers.attend import local_attend
from layers.tag import Tag
from recipes import MeshConfig, Placement, make_mesh, place
from recipes.sharding.attention import ContextAttend
from recipes.sharding.rules import shardings
from tests import helpers
from tests.recipes.test_sharding import LLAMA


@dataclasses.dataclass(frozen=True)
class Device:
    """What ordering devices looks at."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "none"


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ({"replica": 2, "fsdp": 4}, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # along `replica`
        ({"fsdp": 4, "tensor": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"replica": 2, "fsdp": 2, "expert": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
    ids=str,
)
def test_slices_follow_one_another_along_replica_or_fsdp(shape: dict[str, int], rows: list[list[int]]):
    devices = [Device(number, number // 4) for number in range(8)]
    grid = make_mesh(MeshConfig(**shape, slices=2), devices[::-1]).devices
    assert np.vectorize(lambda device: device.id)(grid).reshape(len(rows), -1).tolist() == rows
    with pytest.raises(zoo.ConfigError, match=r"mesh.slices=4: the devices do not stand so"):
        make_mesh(MeshConfig(fsdp=8, slices=4), devices)


def test_a_mesh_that_does_not_divide_an_array_names_both():
    mesh = make_mesh(MeshConfig(tensor=8))
    narrow = zoo.abstract(LLAMA, mlp_dim=12)
    with pytest.raises(zoo.ConfigError, match=r"mesh.tensor=8: tensor = 8 does not divide the dim mlp=12 of layers"):
        place(narrow, Placement(), mesh)
    with pytest.raises(zoo.ConfigError, match=r"mesh.fsdp=4: the mesh needs 4 devices \(fsdp=4\), there are 8"):
        make_mesh(MeshConfig(fsdp=4))


def test_two_dims_on_one_mesh_axis_are_an_error():
    class Square(eqx.Module):
        linear: Linear

    square = Square(Linear(8, 8, dims=("heads", "mlp"), key=jax.random.key(0)))
    with pytest.raises(ValueError, match="dims heads and mlp are both split by mesh axis tensor"):
        shardings(square, make_mesh(MeshConfig(tensor=8)))


def test_attention_along_context_is_that_of_one_device():
    """Segments included; and no device has the scores of another one's queries."""
    mesh = make_mesh(MeshConfig(context=4, fsdp=2))
    query, key, value = (jnp.asarray(helpers.normal(i, 2, 16, heads, 4)) for i, heads in enumerate((4, 2, 2)))
    segments = jnp.asarray(np.broadcast_to(np.arange(16, dtype=np.int32) > 6, (2, 16)).astype(np.int32))
    tags = {
        "context": Tag("attn_context", Float[Array, "batch seq heads value_dim"]),
        "lse": Tag("attn_lse", Float[Array, "batch heads seq"]),
    }

    def run(attend: Any) -> Any:
        def loss(*args: Any) -> jax.Array:
            return jnp.sum(jnp.sin(attend(*args, segments, scale=0.5, **tags)))

        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        text = gradient.lower(query, key, value).compile().as_text()
        return gradient(query, key, value), [int(n) for n in re.findall(r"f32\[1,2,2,(\d+),\d+\]", text or "")]

    (actual, split), (expected, _) = run(ContextAttend(mesh)), run(local_attend)
    helpers.assert_close(actual, expected, helpers.FLOAT32)
    assert split
    assert max(split) == 16 // 4
