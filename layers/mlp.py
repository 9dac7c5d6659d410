"""The gated feed-forward layer."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from layers.linear import Linear
from layers.tag import Tag, name_tags, tag


class SwiGLU(eqx.Module):
    r"""$y = (\mathrm{silu}(x W_g) \odot x W_u) W_d$ (Shazeer, arXiv 2002.05202; Hugging Face `LlamaMLP`).

    Also the shared expert of DeepSeek, with `prefix="shared"`.
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    gate: Tag[Float[Array, "*batch hidden"]] = tag()
    up: Tag[Float[Array, "*batch hidden"]] = tag()

    def __init__(self, dim: int, hidden_dim: int, *, std: float = 0.02, prefix: str = "mlp", key: PRNGKeyArray):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate_proj = Linear(dim, hidden_dim, std=std, dims=("embed", "mlp"), key=gate_key)
        self.up_proj = Linear(dim, hidden_dim, std=std, dims=("embed", "mlp"), key=up_key)
        self.down_proj = Linear(hidden_dim, dim, std=std, dims=("mlp", "embed"), key=down_key)
        name_tags(self, prefix)

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        gate = self.gate(self.gate_proj(x))
        up = self.up(self.up_proj(x))
        return self.down_proj(jax.nn.silu(gate) * up)
