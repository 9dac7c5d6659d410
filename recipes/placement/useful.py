"""States on the host that cannot be, or would not help: refused before anything runs."""

from typing import Any

from jaxtyping import PyTree

from recipes.placement.hosted import HOST_KIND
from recipes.placement.settle import describe
from recipes.placement.state import StatePlacement
from zoo.checks import ConfigError


def require_host_memory(device: Any) -> None:
    """Raises ConfigError for a device that has no pinned memory of its host."""
    found = [memory.kind for memory in device.addressable_memories()]
    if HOST_KIND not in found:
        problem = f"{device.device_kind} has no memory of kind {HOST_KIND}, only {', '.join(found)}"
        raise ConfigError("placement.state", "host", problem)


def require_gradients_of_layers(model: PyTree, state: StatePlacement) -> None:
    """Raises ConfigError if only gradients outside of layers are to be on the host, where nothing is accumulated.

    Those arise whole, on the device: it gets no emptier. Gradients of layers go to the host one layer at a time.
    """
    found = list(describe(model))
    num_layers = 1 + max((layer for _, _, layer in found if layer is not None), default=-1)
    hosted = [layer for _, names, layer in found if state.place("gradients", names, layer, num_layers) == "host"]
    if hosted and all(layer is None for layer in hosted):
        entry = next(entry for entry in state.entries() if entry.kind == "gradients" and entry.place == "host")
        problem = "cannot help: gradients outside of layers arise whole, on the device, and are not kept between steps"
        raise ConfigError(entry.key, "host", problem, hint="name gradients of layers, or set train.accumulate above 1")
