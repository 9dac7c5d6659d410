"""Losses of a batch, and the cross-entropy that never stores the logits of all positions at once."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Float32, Int

from layers.moe import MoEStats

Batch = Mapping[str, Array]


class Loss(eqx.Module):
    """What a loss function returns: sums over the batch, so that micro-batches add up to the full batch exactly.

    The step minimises `total / weight`, both summed over micro-batches. `metrics` are further sums, reported divided
    by the weight; one named `loss` is reported in place of `total / weight`. `stats` lets the step update router
    biases.
    """

    total: Float32[Array, ""]
    weight: Float32[Array, ""]
    metrics: dict[str, Float32[Array, ""]] = eqx.field(default_factory=dict)
    stats: MoEStats | None = None


def next_token_loss(
    model: Any, batch: Batch, *, balance: float = 0.0, z_loss: float = 0.0, mtp: float = 0.3, chunk: int = 128
) -> Loss:
    r"""Cross-entropy of each token given the ones before it, in nats, plus the weighted auxiliary losses.

    $\sum_t w_t \left(-\log p_t + z\, \mathrm{lse}_t^2\right) + \sum_b w_b\, \alpha \sum_l B_{lb}$ with $B$ the
    sequence-wise balance loss of layer $l$, weighted by the tokens $w_b$ of its sequence; and, for a model with $D$
    depths of multi-token prediction, $\frac{\lambda}{D} \sum_k \sum_t w_t (-\log p^k_t)$ (DeepSeek-V3, eq. 24-25).

    `batch`: `tokens` `[batch, seq + 1]`; optional, of the same shape: `loss_mask` (which tokens count as targets),
    `segment_ids` (a segment's first token is no target), `positions`. `z_loss` is $z$ (PaLM, arXiv 2204.02311,
    section 5), `balance` is $\alpha$, `mtp` $\lambda$. Logits are made for `chunk` positions of the sequence at a time.
    """
    tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    context = {name: batch[name][:, :-1] for name in ("positions", "segment_ids") if name in batch}
    weights = _target_weights(batch, 1)
    output = model.forward(tokens, **context)
    chunk = min(chunk, tokens.shape[1])
    total, nll = cross_entropy(output.hidden, model.unembedding, targets, weights, z_loss, chunk)
    metrics = {"loss": nll}
    if output.aux.moe is not None:
        balances = jnp.sum(output.aux.moe.balance_loss * jnp.sum(weights, axis=1)[None])
        metrics["balance_loss"] = jax.lax.stop_gradient(balances)
        total = total + balance * balances
    if output.aux.mtp and mtp:
        ahead = jnp.zeros((), jnp.float32)
        for depth, hidden in enumerate(output.aux.mtp, start=1):
            further = jnp.roll(targets, -depth, axis=1)
            ahead += cross_entropy(hidden, model.unembedding, further, _target_weights(batch, depth + 1), 0.0, chunk)[0]
        ahead = ahead / len(output.aux.mtp)
        metrics["mtp_loss"] = jax.lax.stop_gradient(ahead)
        total = total + mtp * ahead
    return Loss(total, jnp.sum(weights), metrics, output.aux.moe)


def _target_weights(batch: Batch, ahead: int) -> Float32[Array, "batch seq"]:
    """The weight of the token `ahead` places further as a target, at every position that is an input."""
    weights = jnp.ones(batch["tokens"][:, ahead:].shape, jnp.float32)
    if "loss_mask" in batch:
        weights = batch["loss_mask"][:, ahead:].astype(jnp.float32)
    if "segment_ids" in batch:
        same = batch["segment_ids"][:, ahead:] == batch["segment_ids"][:, :-ahead]
        weights = weights * same.astype(jnp.float32)
    return jnp.pad(weights, ((0, 0), (0, batch["tokens"].shape[1] - 1 - weights.shape[1])))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    hidden: Float[Array, "batch seq dim"],
    unembedding: Float[Array, "dim vocab"],
    targets: Int[Array, "batch seq"],
    weights: Float32[Array, "batch seq"],
    z_loss: float,
    chunk: int,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    r"""$\sum w\,(-\log p + z\,\mathrm{lse}^2)$ and $\sum -w \log p$, over `chunk` positions at a time.

    The gradient is made in the forward pass, chunk by chunk, and only scaled in the backward pass: no logits are
    stored and none are computed twice. The second result carries no gradient.
    """

    def visit(sums, part):
        _, lse, nll = _nll(unembedding, *part)
        z = z_loss * jnp.sum(part[2] * lse * lse)
        return (sums[0] + nll + z, sums[1] + nll), None

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(visit, (zero, zero), _chunks(hidden, targets, weights, chunk))[0]


def _cross_entropy_forward(hidden, unembedding, targets, weights, z_loss, chunk):
    def visit(sums, part):
        (total, nlls, d_unembedding), (h, target, weight) = sums, part
        logits, lse, nll = _nll(unembedding, h, target, weight)
        z = z_loss * jnp.sum(weight * lse * lse)
        slope = jnp.exp(logits - lse[..., None]) * (weight * (1 + 2 * z_loss * lse))[..., None]
        hit = target[..., None] == jnp.arange(logits.shape[-1], dtype=target.dtype)[None, None]
        slope = (slope - jnp.where(hit, weight[..., None], 0.0)).astype(h.dtype)
        d_hidden = jnp.einsum("bsv,dv->bsd", slope, unembedding)
        part = jnp.einsum("bsd,bsv->dv", h, slope, preferred_element_type=jnp.float32)
        return (total + nll + z, nlls + nll, d_unembedding + part), d_hidden

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jnp.zeros(unembedding.shape, jnp.float32))
    (total, nlls, d_unembedding), d_hidden = jax.lax.scan(visit, start, _chunks(hidden, targets, weights, chunk))
    d_hidden = rearrange(d_hidden, "n b s d -> b (n s) d")[:, : hidden.shape[1]]
    return (total, nlls), (d_hidden, d_unembedding.astype(unembedding.dtype))


def _cross_entropy_backward(z_loss, chunk, gradients, slopes):
    d_hidden, d_unembedding = gradients
    return (
        d_hidden * slopes[0].astype(d_hidden.dtype),
        d_unembedding * slopes[0].astype(d_unembedding.dtype),
        None,
        None,
    )


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _nll(unembedding, h, target, weight):
    """`(logits, log-sum-exp, weighted sum of -log p)` of one chunk, in float32."""
    logits = jnp.einsum("bsd,dv->bsv", h, unembedding, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    scored = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return logits, lse, jnp.sum(weight * (lse - scored))


def _chunks(hidden, targets, weights, chunk: int):
    """The sequence cut into chunks, a leading dim; padding weighs nothing."""

    def cut(x):
        missing = -x.shape[1] % chunk
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
        return rearrange(x, "b (n s) ... -> n b s ...", s=chunk)

    return cut(hidden), cut(targets), cut(weights)
