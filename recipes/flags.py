"""Compiler options of the train step, by platform. They travel with the jitted step, not in the environment."""

import os
import re
from collections.abc import Mapping
from importlib import metadata

# Without these XLA inlines loops of one trip and then drops or delays the copies to the host, and its own
# rematerialisation undoes a placement: host on 5 single layers of 32 gave 0 host bytes instead of 1.25 GiB.
_DISABLED = "xla_disable_hlo_passes"
_KEEP_PLACEMENT: dict[str, str | bool | int] = {_DISABLED: "rematerialization,simplify-while-loops"}

_OPTIONS: dict[str, dict[str, str | bool | int]] = {
    "cpu": {},
    # Pipelined host offload has been on by default in some versions and wrong in one: say it either way.
    "cuda": _KEEP_PLACEMENT | {"xla_gpu_enable_pipelined_host_offloading": False},
    "tpu": _KEEP_PLACEMENT,
}

# The first jaxlib that knows a flag: an unknown one ends the process.
_SINCE = {"xla_gpu_enable_pipelined_host_offloading": (0, 8, 2)}


def compiler_options(platform: str | None = None) -> dict[str, str | bool | int]:
    """Options for `jax.jit(..., compiler_options=)` on `cpu`, `cuda` or `tpu`, by default the platform at hand.

    What the user's own `XLA_FLAGS` say stays as it is said there; passes to disable are added to theirs.
    """
    if platform is None:
        import jax

        platform = jax.default_backend()
    platform = "cuda" if platform == "gpu" else platform
    given, version = user_flags(os.environ), compiler_version(platform)
    options: dict[str, str | bool | int] = {}
    for name, value in _OPTIONS.get(platform, {}).items():
        if name == _DISABLED and given.get(name):
            options[name] = f"{given[name]},{value}"
        elif name not in given and version >= _SINCE.get(name, ()):
            options[name] = value
    return options


def user_flags(environment: Mapping[str, str]) -> dict[str, str]:
    """Name -> value of the flags in `XLA_FLAGS`; one without a value is `true`."""
    words = environment.get("XLA_FLAGS", "").split()
    pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name: value if equals else "true" for name, equals, value in pairs}


def compiler_version(platform: str) -> tuple[int, ...]:
    """The version of the compiler for a platform: that of its plugin, which need not be that of jaxlib."""
    plugins = {"cuda": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}.get("cuda" if platform == "gpu" else platform, ())
    for package in (*plugins, "jaxlib"):
        try:
            return parse_version(metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    return ()


def parse_version(version: str) -> tuple[int, ...]:
    """`0.12.0.1` as (0, 12, 0, 1); what follows the numbers is dropped."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
