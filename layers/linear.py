"""Linear map without bias, as every projection of the two families is."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from layers.axes import Axes, Dims
from layers.wide import product


class Linear(eqx.Module):
    """$y = x W$ with `weight` of shape `[in, out]`, drawn from a normal distribution of deviation `std`.

    `dims` names the two dims, see `layers.axes`.
    """

    weight: Float[Array, "in_dim out_dim"]
    dims: Dims = eqx.field(static=True)
    wide: bool = eqx.field(static=True)  # see `layers.wide`

    def __init__(self, in_dim: int, out_dim: int, *, std: float = 0.02, dims: Dims = (None, None), key: PRNGKeyArray):
        self.dims, self.wide = dims, False
        self.weight = std * jax.random.normal(key, (in_dim, out_dim), jnp.float32)

    def __call__(self, x: Float[Array, "*batch in_dim"]) -> Float[Array, "*batch out_dim"]:
        return product(x, self.weight) if self.wide else x @ self.weight

    @property
    def axes(self) -> Axes:
        return {"weight": self.dims}
