"""Routed experts.

Dims: t tokens, k experts a token, e experts, n blocks of rows, c rows a block.
"""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from layers.axes import Axes
from layers.dispatch import Dispatch, LocalDispatch
from layers.grouped import Names, Weights, grouped_swiglu
from layers.tag import Tag, name_tags, tag


class Experts(eqx.Module):
    r"""$y_t = \sum_k w_{tk}\, \mathrm{SwiGLU}_{i_{tk}}(x_t)$ over the chosen experts $i$.

    Returns $y$ and how many choices the dispatch dropped, none by default. The weight stands before the down
    projection, which is the same sum, so that the backward pass needs no expert's output. The tags name rows in the
    order of dispatch; `plan` names which row goes where, decided once. Source: DeepSeekMoE, arXiv 2401.06066; Hugging
    Face `DeepseekV3MoE`.
    """

    gate_proj: Float[Array, "e dim hidden"]
    up_proj: Float[Array, "e dim hidden"]
    down_proj: Float[Array, "e hidden dim"]
    dispatch: Dispatch = eqx.field(static=True)
    wide: bool = eqx.field(static=True)  # see `layers.wide`
    plan: Tag[Int32[Array, "..."]] = tag()
    dispatched: Tag[Float[Array, "n c dim"]] = tag()
    gate: Tag[Float[Array, "n c hidden"]] = tag()
    up: Tag[Float[Array, "n c hidden"]] = tag()
    axes: ClassVar[Axes] = {
        "gate_proj": ("expert", "expert_embed", "mlp"),
        "up_proj": ("expert", "expert_embed", "mlp"),
        "down_proj": ("expert", "mlp", "expert_embed"),
    }

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
        self.dispatch, self.wide = dispatch, False
        name_tags(self, prefix)

    def __call__(
        self, x: Float[Array, "*t dim"], weights: Float[Array, "*t k"], chosen: Int32[Array, "*t k"]
    ) -> tuple[Float[Array, "*t dim"], Int32[Array, ""]]:
        projections = Weights(self.gate_proj, self.up_proj, self.down_proj)
        if self.wide:
            projections = jax.tree.map(lambda weight: weight.astype(jnp.float32), projections)
        return self.dispatch.run(self._compute, projections, x, weights, chosen)

    def _compute(
        self,
        projections: Weights,
        x: Float[Array, "*t dim"],
        weights: Float[Array, "*t k"],
        chosen: Int32[Array, "*t k"],
    ) -> tuple[Float[Array, "*t dim"], Int32[Array, ""]]:
        projections = jax.tree.map(lambda weight: weight.astype(x.dtype), projections)
        shape = x.shape
        x, weights, chosen = (part.reshape(-1, part.shape[-1]) for part in (x, weights, chosen))
        plan = jax.tree.map(self.plan, self.dispatch.plan(chosen, projections.gate.shape[0]))
        rows, scales = self.dispatch.send(x, weights, plan)
        y = grouped_swiglu(
            self.dispatched(rows), scales.astype(x.dtype), projections, plan.experts, Names(self.gate, self.up)
        )
        return self.dispatch.receive(y, plan).reshape(shape), plan.dropped
