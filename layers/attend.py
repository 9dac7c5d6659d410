"""Causal attention whose memory grows linearly with the sequence, backward pass included, on every backend.

The forward pass keeps, besides its arguments, the context and the log-sum-exp of each row of scores; the backward pass
rebuilds the probabilities from these (Dao et al., arXiv 2205.14135). Both are named *inside* the forward rule: tagged
outside, they would be recomputed however they are placed.

Sequences up to one chunk are computed densely. Longer ones walk over the pairs of chunks below the diagonal in one
scan: half of the square, no matter of data-dependent control flow, score blocks of `[chunk, chunk]` a head.

Dims: b batch, h key-value heads, g query heads a key-value head, q/s positions of queries/keys, d/v head sizes,
n chunks, c positions a chunk.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Int

from layers.tag import Tag

CHUNK = 512


@runtime_checkable
class Attend(Protocol):
    """What an attention layer calls. Another implementation (a kernel, a sharded one) must apply both tags."""

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads value_dim"],
        segment_ids: Int[Array, "batch seq"] | None,
        *,
        scale: float,
        context: Tag,
        lse: Tag,
    ) -> Float[Array, "batch seq heads value_dim"]: ...


def local_attend(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segment_ids: Int[Array, "batch seq"] | None = None,
    *,
    scale: float,
    context: Tag,
    lse: Tag,
    chunk: int = CHUNK,
    first: Int[Array, ""] | None = None,
) -> Float[Array, "batch queries heads value_dim"]:
    r"""$\mathrm{softmax}(\mathrm{scale} \cdot q k^T + \mathrm{mask})\, v$, the softmax in float32.

    A position sees itself and earlier positions of its own segment (all of them without `segment_ids`). Groups of
    `heads / kv_heads` query heads share a key-value head. `context` and `lse` are the tags of what the backward pass
    reads: the result `[batch seq heads value_dim]` and the log-sum-exp `[batch heads seq]`, float32.

    There are as many queries as keys, or with `first` those of some positions alone, the first of which it is.
    """
    segmented = segment_ids is not None
    if segment_ids is None:
        segment_ids = jnp.zeros(key.shape[:2], jnp.int32)
    chunk = min(chunk, query.shape[1])
    return _attend(query, key, value, segment_ids, first, scale, chunk, segmented, _Names(context, lse))


class _Names(NamedTuple):
    context: Tag
    lse: Tag


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _attend(query, key, value, segment_ids, first, scale, chunk, segmented, names):
    context, _ = _forward(_Blocks.split(query, key, value, segment_ids, first, chunk), scale, segmented)
    return _join_queries(context, query).astype(value.dtype)


def _attend_forward(query, key, value, segment_ids, first, scale, chunk, segmented, names):
    blocks = _Blocks.split(query, key, value, segment_ids, first, chunk)
    context, lse = _forward(blocks, scale, segmented)
    context = names.context(_join_queries(context, query).astype(value.dtype))
    lse = names.lse(rearrange(lse, "n b h g c -> b (h g) (n c)")[..., : query.shape[1]])
    # Of one chunk the probabilities too: recomputation then has the scores at hand and needs no second product. They
    # come from the *named* log-sum-exp, so that where that is saved no maximum and no sum is taken again.
    weights = None
    if blocks.dense:
        weights = _weights(blocks, 0, 0, _split_rows(lse, key.shape[2], chunk), scale, segmented)
        # Computed once, in the buffer of the scores: merged with the backward pass's product, XLA may need a third one.
        weights = jax.lax.optimization_barrier(weights)
    return context, (query, key, value, segment_ids, first, context, lse, weights)


def _attend_backward(scale, chunk, segmented, names, residuals, d_context):
    query, key, value, segment_ids, first, context, lse, weights = residuals
    delta = jnp.einsum("bshv,bshv->bhs", context, d_context, preferred_element_type=jnp.float32)
    blocks = _Blocks.split(query, key, value, segment_ids, first, chunk)
    lse, delta = (_split_rows(x, key.shape[2], chunk) for x in (lse, delta))
    slopes = _split_queries(d_context, key.shape[2], chunk)
    if weights is not None:
        sums = (x[None] for x in _pair_gradients(blocks, 0, 0, weights, delta, slopes, scale))
    else:
        sums = _backward(blocks, lse, delta, slopes, scale, segmented)
    joined = zip((_join_queries, _join_keys, _join_keys), sums, (query, key, value), strict=True)
    return (*(join(total, like).astype(like.dtype) for join, total, like in joined), None, None)


_attend.defvjp(_attend_forward, _attend_backward)


class _Blocks(NamedTuple):
    """The arguments cut into chunks; the last chunk is padded, and causality alone keeps the padding out.

    `n` counts chunks of queries or of keys, which differ where the queries are of some positions alone, from `first`.
    """

    query: Float[Array, "n b h g c d"]
    key: Float[Array, "n b h c d"]
    value: Float[Array, "n b h c v"]
    segments: Int[Array, "n b c"]
    query_segments: Int[Array, "n b c"]
    first: Int[Array, ""] | None

    @classmethod
    def split(cls, query, key, value, segment_ids, first, chunk: int) -> "_Blocks":
        keys, values = (rearrange(_pad(x, chunk), "b (n c) h d -> n b h c d", c=chunk) for x in (key, value))
        segments = rearrange(_pad(segment_ids, chunk), "b (n c) -> n b c", c=chunk)
        own = segments
        if first is not None:
            own = jax.lax.dynamic_slice_in_dim(segment_ids, first, query.shape[1], axis=1)
            own = rearrange(_pad(own, chunk), "b (n c) -> n b c", c=chunk)
        return cls(_split_queries(query, key.shape[2], chunk), keys, values, segments, own, first)

    @property
    def dense(self) -> bool:
        return self.key.shape[0] == 1

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs (query chunk, key chunk) row by row: those at or below the diagonal, all where that is not known."""
        queries, keys = self.query.shape[0], self.key.shape[0]
        rows, columns = np.tril_indices(keys) if self.first is None else np.indices((queries, keys)).reshape(2, -1)
        return rows.astype(np.int32), columns.astype(np.int32)

    def scores(self, i, j, scale: float) -> Float[Array, "b h g q s"]:
        """Scores of query chunk `i` against key chunk `j`, of keys that the query must not see too."""
        query, key = _at(self.query, i), _at(self.key, j)
        return scale * jnp.einsum("bhgqd,bhsd->bhgqs", query, key, preferred_element_type=jnp.float32)

    def mask(self, i, j, segmented: bool) -> Float[Array, "#b 1 1 q s"]:
        """What to add to them: zero, and minus infinity where the query must not see the key."""
        # JAX moves what depends on no argument out of the loops over layers and chunks: the masks of all pairs of
        # chunks, which grow with the square of the sequence. A zero that seems to depend on the queries keeps it in
        # the loops; XLA drops it.
        zero = jnp.sum(self.query[:0], dtype=jnp.float32)
        chunk = self.key.shape[3]
        rows, columns = (jnp.arange(chunk) + block * chunk for block in (i, j))
        rows = rows + zero.astype(jnp.int32)
        rows = rows if self.first is None else rows + self.first
        seen = (rows[:, None] >= columns[None, :])[None, None, None]
        if segmented:
            same = _at(self.query_segments, i)[:, :, None] == _at(self.segments, j)[:, None, :]
            seen = seen & same[:, None, None]
        return jnp.where(seen, zero, zero - jnp.inf)


def _forward(blocks: _Blocks, scale: float, segmented: bool):
    """`(context [n b h g c v], lse [n b h g c])`, both float32."""
    if blocks.dense:
        scores, mask = blocks.scores(0, 0, scale), blocks.mask(0, 0, segmented)
        top = jnp.max(scores + mask, -1, keepdims=True)
        # Not of one array the maximum and the difference from it: XLA would spend seconds on tilings of such a kernel.
        weights = jnp.exp(scores - top + mask)
        total = jnp.sum(weights, -1)
        context = _weigh(weights, blocks.value[0]) / total[..., None]
        return context[None], (top[..., 0] + jnp.log(total))[None]

    def visit(carry, pair):
        (context, top, total), (i, j) = carry, pair
        scores = blocks.scores(i, j, scale) + blocks.mask(i, j, segmented)
        old = _at(top, i)
        new = jnp.maximum(old, jnp.max(scores, -1))
        # A chunk may hold no key of the row's segment: nothing has been seen, and exp(-inf - -inf) must not appear.
        shift = jnp.where(jnp.isneginf(new), 0.0, new)
        weights, decay = jnp.exp(scores - shift[..., None]), jnp.exp(old - shift)
        context = _put(context, i, _at(context, i) * decay[..., None] + _weigh(weights, _at(blocks.value, j)))
        total = _put(total, i, _at(total, i) * decay + jnp.sum(weights, -1))
        return (context, _put(top, i, new), total), None

    rows = blocks.query.shape[:-1]
    zeros = jnp.zeros((*rows, blocks.value.shape[-1]), jnp.float32)
    start = (zeros, jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32))
    (context, top, total), _ = jax.lax.scan(visit, start, blocks.pairs)
    return context / total[..., None], top + jnp.log(total)


def _backward(blocks: _Blocks, lse, delta, slopes, scale: float, segmented: bool):
    """Gradients of queries `[n b h g c d]`, keys `[n b h c d]` and values `[n b h c v]`, float32."""

    def visit(sums, pair):
        i, j = pair
        weights = _weights(blocks, i, j, lse, scale, segmented)
        parts = _pair_gradients(blocks, i, j, weights, delta, slopes, scale)
        return tuple(_put(s, k, _at(s, k) + x) for s, k, x in zip(sums, (i, j, j), parts, strict=True)), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in blocks[:3])
    return jax.lax.scan(visit, start, blocks.pairs)[0]


def _weights(blocks: _Blocks, i, j, lse, scale: float, segmented: bool) -> Float[Array, "b h g q s"]:
    """Probabilities of query chunk `i` on key chunk `j`."""
    return jnp.exp(blocks.scores(i, j, scale) - _at(lse, i)[..., None] + blocks.mask(i, j, segmented))


def _pair_gradients(blocks: _Blocks, i, j, weights, delta, slopes, scale: float):
    """What query chunk `i` and key chunk `j` give to the gradients of queries, keys and values."""
    query, key, value, slope = (_at(x, k) for x, k in zip((*blocks[:3], slopes), (i, j, j, i), strict=True))
    d_weights = jnp.einsum("bhgqv,bhsv->bhgqs", slope, value, preferred_element_type=jnp.float32)
    d_scores = (scale * weights * (d_weights - _at(delta, i)[..., None])).astype(query.dtype)
    return (
        jnp.einsum("bhgqs,bhsd->bhgqd", d_scores, key, preferred_element_type=jnp.float32),
        jnp.einsum("bhgqs,bhgqd->bhsd", d_scores, query, preferred_element_type=jnp.float32),
        jnp.einsum("bhgqs,bhgqv->bhsv", weights.astype(slope.dtype), slope, preferred_element_type=jnp.float32),
    )


def _weigh(weights, value):
    return jnp.einsum("bhgqs,bhsv->bhgqv", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)


def _at(x, i):
    return x[i] if isinstance(i, int) else jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x, i, part):
    return jax.lax.dynamic_update_index_in_dim(x, part, i, axis=0)


def _pad(x, chunk: int):
    missing = -x.shape[1] % chunk
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x


def _split_queries(x, kv_heads: int, chunk: int):
    return rearrange(_pad(x, chunk), "b (n c) (h g) d -> n b h g c d", c=chunk, h=kv_heads)


def _split_rows(x, kv_heads: int, chunk: int):
    return _split_queries(rearrange(x, "b h s -> b s h 1"), kv_heads, chunk)[..., 0]


def _join_queries(x, like):
    return rearrange(x, "n b h g c d -> b (n c) (h g) d")[:, : like.shape[1]]


def _join_keys(x, like):
    return rearrange(x, "n b h c d -> b (n c) h d")[:, : like.shape[1]]
