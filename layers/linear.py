"""Linear map without bias, as every projection of the two families is."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from layers.axes import Axes, Dims


class Linear(eqx.Module):
    """$y = x W$ with `weight` of shape `[in, out]`, drawn from a normal distribution of deviation `std`.

    `dims` names the two dims, see `layers.axes`.
    """

    weight: Float[Array, "in_dim out_dim"]
    dims: Dims = eqx.field(static=True)

    def __init__(self, in_dim: int, out_dim: int, *, std: float = 0.02, dims: Dims = (None, None), key: PRNGKeyArray):
        self.dims = dims
        self.weight = std * jax.random.normal(key, (in_dim, out_dim), jnp.float32)

    def __call__(self, x: Float[Array, "*batch in_dim"]) -> Float[Array, "*batch out_dim"]:
        return x @ self.weight

    @property
    def axes(self) -> Axes:
        return {"weight": self.dims}
