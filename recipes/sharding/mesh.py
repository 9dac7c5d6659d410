"""A mesh of devices."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from recipes.sharding.config import MeshConfig
from zoo.checks import ConfigError


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices, or over those given, in an order that suits their links.

    Raises ConfigError unless the axes multiply to the number of devices.
    """
    found = list(jax.devices() if devices is None else devices)
    shape = config.shape
    if config.num_devices != len(found):
        product = " x ".join(f"{name}={size}" for name, size in shape.items() if size > 1) or "1"
        axis = max(shape, key=lambda name: shape[name])
        problem = f"the mesh needs {config.num_devices} devices ({product}), there are {len(found)}"
        raise ConfigError(f"mesh.{axis}", shape[axis], problem)
    kinds = (AxisType.Auto,) * len(shape)
    if devices is None:
        return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
    return Mesh(np.asarray(found).reshape(tuple(shape.values())), tuple(shape), axis_types=kinds)
