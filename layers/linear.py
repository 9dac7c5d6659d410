"""Linear map without bias, as every projection of the two families is."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Linear(eqx.Module):
    """$y = x W$ with `weight` of shape `[in, out]`, drawn from a normal distribution of deviation `std`."""

    weight: Float[Array, "in_dim out_dim"]

    def __init__(self, in_dim: int, out_dim: int, *, std: float = 0.02, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (in_dim, out_dim), jnp.float32)

    def __call__(self, x: Float[Array, "*batch in_dim"]) -> Float[Array, "*batch out_dim"]:
        return x @ self.weight
