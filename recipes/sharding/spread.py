"""What a model's layers do otherwise on a mesh, all of it."""

from jax.sharding import Mesh
from jaxtyping import PyTree

from recipes.sharding.attention import gather_attention, spread_attention
from recipes.sharding.experts import gather_experts, spread_experts


def spread(model: PyTree, mesh: Mesh, expert_bound: float) -> PyTree:
    """The model with experts and attention spread over the mesh, see `spread_experts` and `spread_attention`."""
    return spread_attention(spread_experts(model, mesh, expert_bound), mesh)


def gather(model: PyTree) -> PyTree:
    """Exact inverse of `spread`."""
    return gather_attention(gather_experts(model))
