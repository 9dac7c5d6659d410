"""Experts on a mesh: each device dispatches its own tokens, and experts live on the devices of the `expert` axis."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32, PyTree

from layers.dispatch import CapacityDispatch, LocalDispatch, Plan
from layers.experts import Experts
from layers.nodes import map_nodes, replaced
from recipes.sharding.rules import BATCH, SEQUENCE

EXPERT = "expert"


def spread_experts(model: PyTree, mesh: Mesh, bound: float) -> PyTree:
    """The model with its experts spread over the mesh.

    Along `expert` each device sends at most `bound` times the mean load to an expert (a model's own capacity factor
    comes first); what comes beyond is dropped and counted. Without that axis nothing is dropped that was not before.
    """

    def change(experts: Experts) -> Experts:
        inner: Any = experts.dispatch
        if mesh.shape[EXPERT] > 1:
            inner = ExchangeDispatch(mesh.shape[EXPERT], getattr(inner, "factor", bound))
        return replaced(experts, dispatch=MeshDispatch(mesh, inner, experts.dispatch))

    return map_nodes(change, model, Experts)


def gather_experts(model: PyTree) -> PyTree:
    """Exact inverse of `spread_experts`."""

    def change(experts: Experts) -> Experts:
        dispatch = experts.dispatch
        return replaced(experts, dispatch=dispatch.canonical) if isinstance(dispatch, MeshDispatch) else experts

    return map_nodes(change, model, Experts)


class ExchangeDispatch(NamedTuple):
    """Inside a `shard_map` over the axis `expert`: rows go to the device of their expert and come back.

    Static buffers: `factor` times the mean load from each device for each expert. Source: GShard, arXiv 2006.16668.
    """

    devices: int
    factor: float

    def plan(self, chosen: Int32[Array, "t k"], num_experts: int) -> Plan:
        """`num_experts` are those of one device; blocks come by expert, then by the device that sent them."""
        plan = CapacityDispatch(self.factor).plan(chosen, num_experts * self.devices)
        # Rows are sent in one dim: of two XLA keeps all rows once more while the gradients of others are exchanged.
        rows = plan.choice_of_row.reshape(-1)
        return plan._replace(
            choice_of_row=rows, experts=jnp.repeat(jnp.arange(num_experts, dtype=jnp.int32), self.devices)
        )

    def send(
        self, x: Float[Array, "t d"], weights: Float[Array, "t k"], plan: Plan
    ) -> tuple[Float[Array, "n c d"], Float[Array, "n c"]]:
        rows, scales = LocalDispatch().send(x, weights, plan)
        blocks = plan.experts.size
        return self._exchange(rows.reshape(blocks, -1, x.shape[-1])), self._exchange(scales.reshape(blocks, -1))

    def receive(self, rows: Float[Array, "n c d"], plan: Plan) -> Float[Array, "t d"]:
        return LocalDispatch().receive(self._return(rows).reshape(-1, rows.shape[-1]), plan)

    def _exchange(self, rows: Array) -> Array:
        """From `[(device expert) ...]`, what is to go, to `[(expert device) ...]`, what came."""
        came = jax.lax.all_to_all(rows, EXPERT, 0, 0, tiled=True)
        return came.reshape(self.devices, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    def _return(self, rows: Array) -> Array:
        back = rows.reshape(-1, self.devices, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)
        return jax.lax.all_to_all(back, EXPERT, 0, 0, tiled=True)


class MeshDispatch(NamedTuple):
    """Runs experts on each device for its own tokens; `inner` moves them. Splits by `tensor` are left to XLA.

    `canonical` is the dispatch of the model without a mesh.
    """

    mesh: Mesh
    inner: Any
    canonical: Any

    def run(self, compute: Callable[..., Any], projections: Any, *tokens: Array) -> Any:
        axes = (*BATCH, SEQUENCE)

        def on_device(projections: Any, *tokens: Array) -> Any:
            y, dropped = compute(projections, *tokens)
            return y, jax.lax.psum(dropped, axes)

        split = PartitionSpec(BATCH, SEQUENCE)
        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(PartitionSpec(EXPERT), *(split for _ in tokens)),
            out_specs=(split, PartitionSpec()),
            axis_names=set(axes),
            check_vma=False,
        )
        return run(projections, *tokens)

    def plan(self, chosen: Int32[Array, "t k"], num_experts: int) -> Plan:
        return self.inner.plan(chosen, num_experts)

    def send(
        self, x: Float[Array, "t d"], weights: Float[Array, "t k"], plan: Plan
    ) -> tuple[Float[Array, "n c d"], Float[Array, "n c"]]:
        return self.inner.send(x, weights, plan)

    def receive(self, rows: Float[Array, "n c d"], plan: Plan) -> Float[Array, "t d"]:
        return self.inner.receive(rows, plan)
