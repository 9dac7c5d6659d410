"""Choice of experts: scores, group limit, selection bias, weights.

Dims: b batch, s sequence, e routed experts, g expert groups, k experts a token.
"""

from typing import ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Float32, Int32, PRNGKeyArray

from layers.axes import Axes
from layers.buffer import Buffer
from layers.dispatch import count
from layers.tag import Tag, name_tags, tag


class Routing(NamedTuple):
    """The choice; how many choices fell on each expert; the balance loss of each sequence."""

    weights: Float32[Array, "b s k"]
    chosen: Int32[Array, "b s k"]
    counts: Int32[Array, " e"]
    balance_loss: Float32[Array, " b"]


class Router(eqx.Module):
    r"""Each token's `experts_per_token` experts and their weights, all in float32.

    Affinities $a$ are the softmax or sigmoid of $x W$. The experts with the largest $a + \mathrm{bias}$ are chosen; the
    weights are the *unbiased* affinities of the chosen, normalised to sum to one if `normalize`, times `scale`. With
    `groups` > 1 only the `groups_kept` best groups compete; a group scores by the sum of its two largest biased
    affinities (`top2`, V3) or its largest one (`max`, V2). Experts of other groups are at minus infinity, not at zero.

    The bias is a `Buffer`: the train step moves it outside the gradient. The tag `scores` names $x W$, which the
    backward pass reads, and `chosen` the decision, so that recomputation cannot choose otherwise.

    Source: DeepSeek-V3, arXiv 2412.19437, eq. 12-20; Hugging Face `DeepseekV3TopkRouter`, `DeepseekV2MoEGate`.
    """

    weight: Float[Array, "dim e"]
    bias: Buffer | None
    experts_per_token: int = eqx.field(static=True)
    affinity: Literal["softmax", "sigmoid"] = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    groups_kept: int = eqx.field(static=True)
    group_score: Literal["max", "top2"] = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    scores: Tag[Float32[Array, "b s e"]] = tag()
    chosen: Tag[Int32[Array, "b s k"]] = tag()
    axes: ClassVar[Axes] = {"weight": ("embed", None)}

    def __init__(
        self,
        dim: int,
        num_experts: int,
        experts_per_token: int,
        *,
        affinity: Literal["softmax", "sigmoid"] = "sigmoid",
        selection_bias: bool = True,
        groups: int = 1,
        groups_kept: int = 1,
        group_score: Literal["max", "top2"] = "top2",
        normalize: bool = True,
        scale: float = 1.0,
        std: float = 0.02,
        prefix: str = "moe",
        key: PRNGKeyArray,
    ):
        self.weight = std * jax.random.normal(key, (dim, num_experts), jnp.float32)
        self.bias = Buffer(jnp.zeros(num_experts, jnp.float32)) if selection_bias else None
        self.experts_per_token, self.affinity = experts_per_token, affinity
        self.groups, self.groups_kept, self.group_score = groups, groups_kept, group_score
        self.normalize, self.scale = normalize, scale
        name_tags(self, prefix)

    def __check_init__(self):
        experts, k = self.weight.shape[-1], self.experts_per_token
        if experts % self.groups:
            raise ValueError(f"Expected num_experts={experts} to be divisible by groups={self.groups}")
        reachable = experts // self.groups * self.groups_kept
        if not 1 <= k <= reachable:
            raise ValueError(f"Expected experts_per_token={k} to be between 1 and the {reachable} experts in reach")

    def __call__(self, x: Float[Array, "b s dim"]) -> Routing:
        scores = self.scores(x.astype(jnp.float32) @ self.weight.astype(jnp.float32))
        affinity = jax.nn.sigmoid(scores) if self.affinity == "sigmoid" else jax.nn.softmax(scores, axis=-1)
        chosen = self.chosen(self._choose(jax.lax.stop_gradient(affinity)))
        weights = jnp.take_along_axis(affinity, chosen, axis=-1, mode="promise_in_bounds")
        if self.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        counts = count(chosen.reshape(-1), affinity.shape[-1])
        return Routing(self.scale * weights, chosen, counts, _balance_loss(affinity, self.experts_per_token))

    def _choose(self, affinity: Float32[Array, "b s e"]) -> Int32[Array, "b s k"]:
        if self.bias is not None:
            affinity = affinity + jnp.broadcast_to(jax.lax.stop_gradient(self.bias.value), affinity.shape)
        if self.groups > 1:
            affinity = self._keep_groups(affinity)
        return jax.lax.top_k(affinity, self.experts_per_token)[1]

    def _keep_groups(self, affinity: Float32[Array, "b s e"]) -> Float32[Array, "b s e"]:
        grouped = rearrange(affinity, "b s (g m) -> b s g m", g=self.groups)
        rank = _rank(grouped)
        best = 2 if self.group_score == "top2" else 1
        group_scores = jnp.sum(jnp.where(rank < best, grouped, 0.0), axis=-1)
        kept = _rank(group_scores) < self.groups_kept
        grouped = jnp.where(kept[..., None], grouped, -jnp.inf)
        return rearrange(grouped, "b s g m -> b s (g m)")


def _rank(scores: Float32[Array, "*dims n"]) -> Int32[Array, "*dims n"]:
    """How many are larger, or as large and before it: the place of each in the order of `top_k`, without a sort."""
    own, others = scores[..., :, None], scores[..., None, :]
    earlier = jnp.expand_dims(jnp.tri(scores.shape[-1], k=-1, dtype=bool), range(scores.ndim - 1))
    before = (others > own) | ((others == own) & earlier)
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def _balance_loss(affinity: Float32[Array, "b s e"], k: int) -> Float32[Array, " b"]:
    r"""$\sum_i f_i P_i$ of each sequence (V3 report, eq. 17-20, without the factor $\alpha$).

    $f_i = \frac{e}{k s} \sum_t 1(a_{it} \in \mathrm{topk}(a_t))$, without gradient; $P_i$ is the mean over the
    sequence of the affinities normalised to sum to one. Even load gives 1.
    """
    length, experts = affinity.shape[1:]
    top = jax.lax.top_k(jax.lax.stop_gradient(affinity), k)[1]
    hits = jnp.sum(jax.nn.one_hot(top, experts, dtype=jnp.float32), axis=(1, 2))
    shares = jnp.mean(affinity / (jnp.sum(affinity, axis=-1, keepdims=True) + 1e-20), axis=1)
    return jnp.sum(experts / (k * length) * hits * shares, axis=-1)
