"""`target=local`: the devices at hand as a target."""

import dataclasses
from typing import Any

from recipes.plan.targets import Target
from zoo import presets
from zoo.checks import ConfigError


def at_hand(asked: Target) -> Target:
    """The target that describes the devices at hand, with the memory that their runtime gives to programs.

    Raises ConfigError if there are too few devices, or no file of `conf/target` has their name.
    """
    import jax

    devices = jax.devices()
    if len(devices) < asked.devices:
        raise ConfigError("target.devices", asked.devices, f"there are {len(devices)} at hand")
    return described(devices[0].device_kind, devices[0].memory_stats() or {}, asked.devices)


def described(kind: str, stats: dict[str, Any], devices: int) -> Target:
    """The target whose `device_name` is the kind, as `local`; `stats` is what `Device.memory_stats` gives."""
    known = [Target.named(name) for name in presets.names("target") if name != "local"]
    # A target of one's own may be made of the same device: the file with the plain name comes first.
    found = [target for target in known if target.device_name == kind and target.name != "cxl_tier"]
    if not found:
        names = [target.device_name for target in known if target.device_name is not None]
        hint = "name a target, or write a file with this device_name"
        raise ConfigError("target", "local", f"no target describes a {kind!r}", allowed=sorted(set(names)), hint=hint)
    limit = stats.get("bytes_limit")
    memory = {} if limit is None else {"hbm_bytes": int(limit), "usable_fraction": 1.0}
    return dataclasses.replace(found[0], name="local", platform="local", devices=devices, **memory)
