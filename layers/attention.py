"""Grouped-query attention, the attention of the Llama family."""

import equinox as eqx
import jax
from einops import rearrange
from jaxtyping import Array, Float, Int, PRNGKeyArray

from layers.attend import Attend, local_attend
from layers.linear import Linear
from layers.rope import Rotation
from layers.tag import Tag, name_tags, tag


class Attention(eqx.Module):
    """Causal self-attention with `num_heads / num_kv_heads` query heads a key-value head.

    Source: Ainslie et al., arXiv 2305.13245; Hugging Face `LlamaAttention`. Raises ValueError if `num_heads` is not
    divisible by `num_kv_heads`.
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    out_proj: Linear
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    attend: Attend = eqx.field(static=True)
    query: Tag[Float[Array, "batch seq heads head_dim"]] = tag()
    key: Tag[Float[Array, "batch seq kv_heads head_dim"]] = tag()
    value: Tag[Float[Array, "batch seq kv_heads head_dim"]] = tag()
    context: Tag[Float[Array, "batch seq heads head_dim"]] = tag()
    lse: Tag[Float[Array, "batch heads seq"]] = tag(follows="context")
    out: Tag[Float[Array, "batch seq dim"]] = tag()

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        std: float = 0.02,
        attend: Attend = local_attend,
        prefix: str = "attn",
        key: PRNGKeyArray,
    ):
        if num_heads % num_kv_heads:
            raise ValueError(f"Expected {num_heads=} to be divisible by {num_kv_heads=}")
        query_key, key_key, value_key, out_key = jax.random.split(key, 4)
        self.query_proj = Linear(dim, num_heads * head_dim, std=std, dims=("embed", "heads"), key=query_key)
        self.key_proj = Linear(dim, num_kv_heads * head_dim, std=std, dims=("embed", "kv_heads"), key=key_key)
        self.value_proj = Linear(dim, num_kv_heads * head_dim, std=std, dims=("embed", "kv_heads"), key=value_key)
        self.out_proj = Linear(num_heads * head_dim, dim, std=std, dims=("heads", "embed"), key=out_key)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.scale = head_dim**-0.5
        self.attend = attend
        name_tags(self, prefix)

    def __call__(
        self,
        x: Float[Array, "batch seq dim"],
        rotation: Rotation,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq dim"]:
        query = rearrange(self.query_proj(x), "b s (h d) -> b s h d", h=self.num_heads)
        key = rearrange(self.key_proj(x), "b s (h d) -> b s h d", h=self.num_kv_heads)
        value = rearrange(self.value_proj(x), "b s (h d) -> b s h d", h=self.num_kv_heads)
        context = self.attend(
            self.query(rotation(query)),
            self.key(rotation(key)),
            self.value(value),
            segment_ids,
            scale=self.scale,
            context=self.context,
            lse=self.lse,
        )
        return self.out(self.out_proj(rearrange(context, "b s h d -> b s (h d)")))
