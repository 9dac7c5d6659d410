"""Transformer blocks: pre-norm attention and feed-forward layer, each added to the residual stream."""

import equinox as eqx
from jaxtyping import Array, Float, Int

from layers.attention import Attention
from layers.mla import MLA
from layers.mlp import SwiGLU
from layers.moe import MoE, MoEStats
from layers.norm import RMSNorm
from layers.rope import Rotation
from layers.tag import Tag, name_tags, tag


class DenseBlock(eqx.Module):
    """$h = x + \\mathrm{attention}(\\mathrm{norm}(x))$, $y = h + \\mathrm{mlp}(\\mathrm{norm}(h))$.

    The block of Llama, and DeepSeek's first layers. The tag `input` names `x`.
    """

    attention_norm: RMSNorm
    attention: Attention | MLA
    mlp_norm: RMSNorm
    mlp: SwiGLU
    input: Tag[Float[Array, "batch seq dim"]] = tag(carried=True)

    def __init__(self, attention: Attention | MLA, mlp: SwiGLU, dim: int, *, eps: float = 1e-6, prefix: str = "block"):
        self.attention_norm, self.attention = RMSNorm(dim, eps=eps), attention
        self.mlp_norm, self.mlp = RMSNorm(dim, eps=eps), mlp
        name_tags(self, prefix)

    def __call__(
        self,
        x: Float[Array, "batch seq dim"],
        rotation: Rotation,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq dim"], None]:
        x = self.input(x)
        x = x + self.attention(self.attention_norm(x), rotation, segment_ids)
        return x + self.mlp(self.mlp_norm(x)), None


class MoEBlock(eqx.Module):
    """As `DenseBlock`, with a mixture of experts; returns the router's statistics beside the hidden states."""

    attention_norm: RMSNorm
    attention: Attention | MLA
    moe_norm: RMSNorm
    moe: MoE
    input: Tag[Float[Array, "batch seq dim"]] = tag(carried=True)

    def __init__(self, attention: Attention | MLA, moe: MoE, dim: int, *, eps: float = 1e-6, prefix: str = "block"):
        self.attention_norm, self.attention = RMSNorm(dim, eps=eps), attention
        self.moe_norm, self.moe = RMSNorm(dim, eps=eps), moe
        name_tags(self, prefix)

    def __call__(
        self,
        x: Float[Array, "batch seq dim"],
        rotation: Rotation,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq dim"], MoEStats]:
        x = self.input(x)
        x = x + self.attention(self.attention_norm(x), rotation, segment_ids)
        y, stats = self.moe(self.moe_norm(x))
        return x + y, stats
