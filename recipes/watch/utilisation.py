"""How much of a device's peak a run uses, and how much of its memory."""

from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import PyTree

from layers import MLA, Attention, Embedding, MoE
from recipes.plan.local import described
from recipes.plan.targets import Target
from zoo.base import Decoder
from zoo.checks import ConfigError


def known_target(kind: str) -> Target | None:
    """The target whose figures are those of a kind of device (`jax.Device.device_kind`); None if there is none."""
    try:
        return described(kind, {}, 1)
    except ConfigError:
        return None


def training_flops(model: Decoder, sequence_length: int) -> float:
    r"""Operations that training a canonical model, abstract or not, takes a token: three times the forward pass.

    The forward pass has two for each weight of a matrix that a token meets, of routed experts as many as it chooses,
    and $(s + 1)(d_{qk} + d_v)$ a head for attention to $(s + 1) / 2$ positions on average. Nothing that is computed
    again counts: PaLM's model FLOPs (arXiv 2204.02311, appendix B), but with the causal half of the square alone.
    """
    unembedded = 1 + len(model.mtp)
    products = sum(map(_products, _nodes(model)))
    vocab = 2.0 * model.embedding.weight.size * (unembedded - (model.head is not None))
    attended = (sequence_length + 1.0) * sum(map(_head_dims, _nodes(model)))
    return 3 * (products + vocab + attended)


def device_memory(devices: Iterable[Any] | None = None) -> dict[str, int]:
    """`device_peak_bytes`: the most that any device of this process held so far; nothing where devices do not say."""
    stats = [device.memory_stats() or {} for device in (jax.local_devices() if devices is None else devices)]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"device_peak_bytes": int(max(peaks))} if peaks else {}


def _nodes(model: PyTree) -> list[Any]:
    """MoE layers, attention, embeddings, and whatever else there is, leaf by leaf."""
    return jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, MoE | Attention | MLA | Embedding))


def _products(node: Any) -> float:
    """Operations of the matrices of a node for one token; an embedding is no product."""
    if isinstance(node, MoE):
        share = node.router.experts_per_token / node.router.weight.shape[1]
        return _products(node.router) + share * _matrices(node.experts) + _matrices(node.shared)
    return 0.0 if isinstance(node, Embedding) else _matrices(node)


def _matrices(tree: PyTree) -> float:
    return 2.0 * sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim > 1)


def _head_dims(node: Any) -> int:
    """Sizes of a query and of a value of all heads together."""
    if isinstance(node, Attention):
        return node.query_proj.weight.shape[1] + node.out_proj.weight.shape[0]
    if isinstance(node, MLA):
        return node.query_up.weight.shape[1] + node.out_proj.weight.shape[0]
    return 0
