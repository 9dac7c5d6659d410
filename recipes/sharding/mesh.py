"""A mesh of devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from recipes.sharding.config import AXES, MeshConfig
from zoo.checks import ConfigError


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices, or over those given, in an order that suits their links.

    Raises ConfigError unless the axes multiply to the number of devices, and these stand in `config.slices` slices.
    """
    found = list(jax.devices() if devices is None else devices)
    shape = config.shape
    if config.num_devices != len(found):
        axis = max(shape, key=lambda name: shape[name])
        problem = f"the mesh needs {config.num_devices} devices ({config}), there are {len(found)}"
        raise ConfigError(f"mesh.{axis}", shape[axis], problem)
    if config.slices > 1:
        grid = _hybrid(config, found)
    elif devices is None:
        grid = mesh_utils.create_device_mesh(tuple(shape.values()))
    else:
        grid = np.asarray(found).reshape(tuple(shape.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _hybrid(config: MeshConfig, devices: Sequence[Any]) -> np.ndarray:
    """Devices of one slice are neighbours along all axes; slices follow one another along `replica`, then `fsdp`."""
    across: dict[str, int] = dict.fromkeys(AXES, 1)
    across["replica"] = math.gcd(config.replica, config.slices)
    across["fsdp"] = config.slices // across["replica"]
    within = [size // across[name] for name, size in config.shape.items()]
    by_process = len({getattr(device, "slice_index", 0) for device in devices}) == 1
    try:
        return mesh_utils.create_hybrid_device_mesh(
            within, [across[name] for name in AXES], devices, process_is_granule=by_process
        )
    except ValueError as error:
        problem = f"the devices do not stand so: {error}"
        raise ConfigError("mesh.slices", config.slices, problem) from error
