"""Arrays in host memory: which they are, moving them, and fetching parameters for use."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
HOST_KIND, DEVICE_KIND = "pinned_host", "device"
KINDS = {"host": HOST_KIND, "device": DEVICE_KIND}


def on_host(leaf: Any) -> bool:
    """Whether an array, traced, abstract or real, is in host memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf._memory_space == HOST  # no public way to ask an abstract array for an absent device
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == HOST


def place_of(leaf: Any) -> str:
    """`host` or `device`."""
    return "host" if on_host(leaf) else "device"


def move(leaf: Any, place: str) -> Any:
    """The array on a place, `host` or `device`, in the same parts."""
    if on_host(leaf) == (place == "host"):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return abstract(leaf, leaf.sharding, place)
    return jax.device_put(leaf, HOST if place == "host" else DEVICE)


def abstract(leaf: Any, sharding: Any, place: str) -> jax.ShapeDtypeStruct:
    """A `jax.ShapeDtypeStruct` that is on a place, of a device at hand or of an absent one."""
    space, kind = (HOST, HOST_KIND) if place == "host" else (DEVICE, DEVICE_KIND)
    sharding = sharding and sharding.with_memory_kind(kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, _memory_space=space)


def kind_of(leaf: Any, sharding: Any) -> Any:
    """The sharding with the kind of memory that the array is in: no reshaping moves it."""
    return sharding.with_memory_kind(HOST_KIND) if on_host(leaf) else sharding


def at_hand(tree: PyTree) -> PyTree:
    """The tree with every array on the device."""
    return jax.tree.map(lambda leaf: move(leaf, "device"), tree)


def layer_of(stack: Any, layer: Any) -> Any:
    """One layer of a traced stack, with its leading dim, where the stack is."""
    return jax.lax.dynamic_slice_in_dim(stack, layer, 1)


def with_layer(stack: Any, new: Any, layer: Any) -> Any:
    """The stack with one layer changed, where the stack is."""
    return jax.lax.dynamic_update_slice_in_dim(stack, move(new, place_of(stack)), layer, 0)


def stack_on_host(leaves: Sequence[jax.Array]) -> jax.Array:
    """Arrays on the host of equal parts as one, with a leading dim, without the help of a device."""
    shape, old = (len(leaves), *leaves[0].shape), leaves[0].sharding
    if isinstance(old, NamedSharding):
        new = NamedSharding(old.mesh, PartitionSpec(None, *old.spec), memory_kind=HOST_KIND)
    else:
        new = SingleDeviceSharding(next(iter(old.device_set)), memory_kind=HOST_KIND)
    parts = [[shard.data for shard in leaf.addressable_shards] for leaf in leaves]
    places = [shard.device for shard in leaves[0].addressable_shards]
    stacks = [
        jax.device_put(np.stack(layers), SingleDeviceSharding(device, memory_kind=HOST_KIND))
        for device, *layers in zip(places, *parts, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(shape, new, stacks)


def fetched(source: Any, landing: Any) -> Any:
    """The array `source` on the device, for use in a function that is differentiated by `landing`.

    `landing` is an array of the same shape whose values are never read: its gradient is that of the fetched array, and
    arises on the place where it is. So parameters on the host can have gradients on the device, and the reverse.
    """
    return _fetch(source, landing, jax.typeof(landing).memory_space)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fetch(source: Any, landing: Any, space: Any) -> Any:
    return move(source, "device")


def _forward(source: Any, landing: Any, space: Any) -> tuple[Any, None]:
    return move(source, "device"), None


def _backward(space: Any, _: None, slope: Any) -> tuple[None, Any]:
    # In the layout of the parameters, layer by layer: else XLA transposes the stack of all layers after the loop.
    slope = with_layout_constraint(slope, Layout(tuple(range(slope.ndim))))
    return None, jax.device_put(slope, space) if space == HOST else slope


_fetch.defvjp(_forward, _backward)
