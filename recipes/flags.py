"""Compiler options of the train step, by platform. They travel with the jitted step, not in the environment."""

import jax

# Without these XLA inlines loops of one trip and then drops or delays the copies to the host, and its own
# rematerialisation undoes a placement: host on 5 single layers of 32 gave 0 host bytes instead of 1.25 GiB.
_KEEP_PLACEMENT: dict[str, str | bool | int] = {"xla_disable_hlo_passes": "rematerialization,simplify-while-loops"}

_OPTIONS: dict[str, dict[str, str | bool | int]] = {
    "cpu": {},
    # Pipelined host offload has been on by default in some versions and wrong in one: say it either way.
    "cuda": _KEEP_PLACEMENT | {"xla_gpu_enable_pipelined_host_offloading": False},
    "tpu": _KEEP_PLACEMENT,
}


def compiler_options(platform: str | None = None) -> dict[str, str | bool | int]:
    """Options for `jax.jit(..., compiler_options=)` on `cpu`, `cuda` or `tpu`, by default the platform at hand."""
    if platform is None:
        platform = jax.default_backend()
    return dict(_OPTIONS.get("cuda" if platform == "gpu" else platform, {}))
