"""Routed experts.

Dims: t tokens, k experts a token, e experts, n blocks of rows, c rows a block.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from layers.dispatch import Dispatch, LocalDispatch
from layers.grouped import grouped_matmul
from layers.tag import Tag, name_tags, tag


class Experts(eqx.Module):
    r"""$y_t = \sum_k w_{tk}\, \mathrm{SwiGLU}_{i_{tk}}(x_t)$ over the chosen experts $i$. No token is ever dropped.

    Source: DeepSeekMoE, arXiv 2401.06066; Hugging Face `DeepseekV3MoE`. The tags name rows in the order of dispatch.
    """

    gate_proj: Float[Array, "e dim hidden"]
    up_proj: Float[Array, "e dim hidden"]
    down_proj: Float[Array, "e hidden dim"]
    dispatch: Dispatch = eqx.field(static=True)
    dispatched: Tag[Float[Array, "n c dim"]] = tag()
    gate: Tag[Float[Array, "n c hidden"]] = tag()
    up: Tag[Float[Array, "n c hidden"]] = tag()
    down: Tag[Float[Array, "n c dim"]] = tag()

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        std: float = 0.02,
        dispatch: Dispatch = LocalDispatch(),
        prefix: str = "moe",
        key: PRNGKeyArray,
    ):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate_proj = std * jax.random.normal(gate_key, (num_experts, dim, hidden_dim), jnp.float32)
        self.up_proj = std * jax.random.normal(up_key, (num_experts, dim, hidden_dim), jnp.float32)
        self.down_proj = std * jax.random.normal(down_key, (num_experts, hidden_dim, dim), jnp.float32)
        self.dispatch = dispatch
        name_tags(self, prefix)

    def __call__(
        self, x: Float[Array, "t dim"], weights: Float[Array, "t k"], chosen: Int32[Array, "t k"]
    ) -> Float[Array, "t dim"]:
        plan = self.dispatch.plan(chosen, self.gate_proj.shape[0])
        rows = self.dispatched(self.dispatch.send(x, plan))
        gate = self.gate(grouped_matmul(rows, self.gate_proj, plan.experts))
        up = self.up(grouped_matmul(rows, self.up_proj, plan.experts))
        down = self.down(grouped_matmul(jax.nn.silu(gate) * up, self.down_proj, plan.experts))
        return self.dispatch.receive(down, weights, plan)
