"""The mixture-of-experts feed-forward layer of DeepSeek: a router, routed experts and shared ones."""

import equinox as eqx
from einops import rearrange
from jaxtyping import Array, Float

from layers.experts import Experts
from layers.mlp import SwiGLU
from layers.router import Router, RouterStats


class MoE(eqx.Module):
    """`experts(x)` weighted by the router, plus `shared(x)`, which every token passes (None: no shared expert)."""

    router: Router
    experts: Experts
    shared: SwiGLU | None

    def __call__(self, x: Float[Array, "batch seq dim"]) -> tuple[Float[Array, "batch seq dim"], RouterStats]:
        routing = self.router(x)
        weights, chosen = (rearrange(part, "b s k -> (b s) k") for part in routing[:2])
        y = self.experts(rearrange(x, "b s d -> (b s) d"), weights, chosen)
        y = rearrange(y, "(b s) d -> b s d", b=x.shape[0])
        return (y if self.shared is None else y + self.shared(x)), routing.stats
