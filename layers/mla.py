"""Multi-head latent attention, the attention of DeepSeek V2 and V3.

Dims: h heads, d size of a query or key head (its nope and rope parts together), v size of a value head.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Float, Int, PRNGKeyArray

from layers.attend import Attend, local_attend
from layers.linear import Linear
from layers.norm import RMSNorm
from layers.rope import Rotation
from layers.tag import Tag, name_tags, tag


class MLA(eqx.Module):
    r"""Keys and values are rebuilt from one latent a token; one rotated key part is shared by all heads.

    $c = x W_{DKV}$, $[k^{nope}; v] = \mathrm{norm}(c) W_{UKV}$, $k^{rope} = \mathrm{rope}(x W_{KR})$;
    $q = \mathrm{norm}(x W_{DQ}) W_{UQ}$, or $q = x W_Q$ where `query_rank` is None (V2-Lite).

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and eq. 37-47; Hugging Face `DeepseekV3Attention`.
    `softmax_factor` multiplies the scale `head_dim^-0.5` (YaRN: `Rope.softmax_factor`). The tag `kv_latent` names the
    latent together with the rope key, before norm and rotation; `kv_latent_normed` the latent after its norm.
    """

    query_down: Linear | None
    query_norm: RMSNorm | None
    query_up: Linear
    kv_down: Linear
    kv_norm: RMSNorm
    kv_up: Linear
    out_proj: Linear
    num_heads: int = eqx.field(static=True)
    nope_dim: int = eqx.field(static=True)
    kv_rank: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    attend: Attend = eqx.field(static=True)
    query_latent: Tag[Float[Array, "batch seq query_rank"]] | None = tag()
    query_latent_normed: Tag[Float[Array, "batch seq query_rank"]] | None = tag()
    kv_latent: Tag[Float[Array, "batch seq kv_rank_and_rope"]] = tag()
    kv_latent_normed: Tag[Float[Array, "batch seq kv_rank"]] = tag()
    query: Tag[Float[Array, "batch seq heads head_dim"]] = tag()
    key: Tag[Float[Array, "batch seq heads head_dim"]] = tag()
    value: Tag[Float[Array, "batch seq heads value_dim"]] = tag()
    context: Tag[Float[Array, "batch seq heads value_dim"]] = tag()
    lse: Tag[Float[Array, "batch heads seq"]] = tag(follows="context")
    out: Tag[Float[Array, "batch seq dim"]] = tag()

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        query_rank: int | None,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        softmax_factor: float = 1.0,
        eps: float = 1e-6,
        std: float = 0.02,
        attend: Attend = local_attend,
        prefix: str = "attn",
        key: PRNGKeyArray,
    ):
        down_key, up_key, kv_down_key, kv_up_key, out_key = jax.random.split(key, 5)
        query_dim = num_heads * (nope_dim + rope_dim)
        self.query_down = (
            None if query_rank is None else Linear(dim, query_rank, std=std, dims=("embed", None), key=down_key)
        )
        self.query_norm = None if query_rank is None else RMSNorm(query_rank, eps=eps)
        up_dims = ("embed", "heads") if query_rank is None else ("rank", "heads")
        self.query_up = Linear(query_rank or dim, query_dim, std=std, dims=up_dims, key=up_key)
        self.kv_down = Linear(dim, kv_rank + rope_dim, std=std, dims=("embed", None), key=kv_down_key)
        self.kv_norm = RMSNorm(kv_rank, eps=eps)
        self.kv_up = Linear(kv_rank, num_heads * (nope_dim + value_dim), std=std, dims=("rank", "heads"), key=kv_up_key)
        self.out_proj = Linear(num_heads * value_dim, dim, std=std, dims=("heads", "embed"), key=out_key)
        self.num_heads, self.nope_dim, self.kv_rank = num_heads, nope_dim, kv_rank
        self.scale = (nope_dim + rope_dim) ** -0.5 * softmax_factor
        self.attend = attend
        name_tags(self, prefix)
        if query_rank is None:
            self.query_latent = self.query_latent_normed = None

    def __call__(
        self,
        x: Float[Array, "batch seq dim"],
        rotation: Rotation,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq dim"]:
        key, value = self._keys_and_values(x, rotation)
        context = self.attend(
            self.query(self._queries(x, rotation)),
            self.key(key),
            self.value(value),
            segment_ids,
            scale=self.scale,
            context=self.context,
            lse=self.lse,
        )
        return self.out(self.out_proj(rearrange(context, "b s h v -> b s (h v)")))

    def _queries(self, x: Float[Array, "batch seq dim"], rotation: Rotation) -> Float[Array, "batch seq heads d"]:
        if self.query_down is not None and self.query_norm is not None:
            latent = _mark(self.query_latent, self.query_down(x))
            x = _mark(self.query_latent_normed, self.query_norm(latent))
        query = rearrange(self.query_up(x), "b s (h d) -> b s h d", h=self.num_heads)
        nope, rope = jnp.split(query, [self.nope_dim], axis=-1)
        return jnp.concatenate([nope, rotation(rope)], axis=-1)

    def _keys_and_values(
        self, x: Float[Array, "batch seq dim"], rotation: Rotation
    ) -> tuple[Float[Array, "batch seq heads d"], Float[Array, "batch seq heads v"]]:
        latent, rope = jnp.split(self.kv_latent(self.kv_down(x)), [self.kv_rank], axis=-1)
        up = self.kv_up(self.kv_latent_normed(self.kv_norm(latent)))
        nope, value = jnp.split(rearrange(up, "b s (h d) -> b s h d", h=self.num_heads), [self.nope_dim], axis=-1)
        shared = repeat(rotation(rope[:, :, None]), "b s 1 d -> b s h d", h=self.num_heads)
        return jnp.concatenate([nope, shared], axis=-1), value


def _mark(tag: Tag | None, x: Array) -> Array:
    return x if tag is None else tag(x)
