"""Attention on a mesh that splits the sequence: each device has its own queries, and gathers keys and values."""

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from layers.attend import local_attend
from layers.attention import Attention
from layers.mla import MLA
from layers.nodes import map_nodes, replaced
from layers.tag import Tag
from recipes.sharding.rules import BATCH, SEQUENCE, divides


def spread_attention(model: PyTree, mesh: Mesh) -> PyTree:
    """The model with its attention spread along `context`; one that is not `layers.attend.local_attend` stays."""

    def change(layer: Any) -> Any:
        return replaced(layer, attend=ContextAttend(mesh)) if layer.attend is local_attend else layer

    return map_nodes(change, model, (Attention, MLA)) if mesh.shape[SEQUENCE] > 1 else model


def gather_attention(model: PyTree) -> PyTree:
    """Exact inverse of `spread_attention`."""

    def change(layer: Any) -> Any:
        return replaced(layer, attend=local_attend) if isinstance(layer.attend, ContextAttend) else layer

    return map_nodes(change, model, (Attention, MLA))


class ContextAttend(NamedTuple):
    """`local_attend` of a part of the queries on each device of `context`; splits by `tensor` are left to XLA.

    Every device walks over all keys, so that the last one, which sees them all, takes as long as without causality.
    """

    mesh: Mesh

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads value_dim"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        scale: float,
        context: Tag,
        lse: Tag,
    ) -> Float[Array, "batch seq heads value_dim"]:
        if not divides(query, self.mesh):  # a sample's
            return local_attend(query, key, value, segment_ids, scale=scale, context=context, lse=lse)

        def on_device(query: Array, *others: Any) -> Array:
            others = jax.tree.map(lambda x: jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True), others)
            first = jax.lax.axis_index(SEQUENCE) * query.shape[1]
            return local_attend(query, *others, scale=scale, context=context, lse=lse, first=first)

        split = PartitionSpec(BATCH, SEQUENCE)
        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(split, split, split, None if segment_ids is None else split),
            out_specs=split,
            axis_names={*BATCH, SEQUENCE},
            check_vma=False,
        )
        return run(query, key, value, segment_ids)
