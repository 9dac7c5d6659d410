"""A training step that is not this project's: plain JAX, its own names and policy, right or broken on purpose."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

LAYERS, BATCH, DIM, HIDDEN = 4, 128, 128, 256
State = dict[str, Any]


def make_step(variant: str, layers: int = LAYERS) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """`(state, batch) -> (state, loss)`: momentum over `layers` MLP layers whose hidden arrays go to the host.

    - `misspelt name`, `misspelt destination`: of the policy. `named output`: the name is that of the layer's output;
      `unread value`: of one that no derivative reads.
    - `whole state`: the momenta, which live on the host, are moved to the device all at once; `host compute`: they are
      scaled before they are moved.
    """
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hiden" if variant == "misspelt name" else "hidden"],
        offload_src="device",
        offload_dst="pined_host" if variant == "misspelt destination" else "pinned_host",
    )

    def layer(x, weights):
        up, down = weights
        hidden = x @ up
        if variant not in ("named output", "unread value"):
            hidden = checkpoint_name(hidden, "hidden")
        y = jnp.tanh(hidden) @ down
        if variant == "unread value":
            y = checkpoint_name(y, "hidden")
        x = x + y
        return checkpoint_name(x, "hidden") if variant == "named output" else x, None

    def loss(params, batch):
        x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), batch, params)
        return jnp.mean(jnp.square(x))

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        momenta = state["momenta"]
        if variant in ("whole state", "host compute"):
            momenta = jax.device_put(momenta, jax.memory.Space.Host)
            momenta = jax.tree.map(jnp.tanh, momenta) if variant == "host compute" else momenta
            momenta = jax.device_put(momenta, jax.memory.Space.Device)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momenta)
        if variant == "whole state":
            momenta = jax.device_put(momenta, jax.memory.Space.Host)
        return {"params": params, "momenta": momenta}, value

    return step


def arguments(layers: int = LAYERS) -> tuple[State, Any]:
    """The step's arguments, abstract."""
    weights = tuple(jax.ShapeDtypeStruct((layers, *dims), jnp.float32) for dims in ((DIM, HIDDEN), (HIDDEN, DIM)))
    return {"params": weights, "momenta": weights}, jax.ShapeDtypeStruct((BATCH, DIM), jnp.float32)
