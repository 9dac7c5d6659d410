"""The mixture-of-experts feed-forward layer of DeepSeek: a router, routed experts and shared ones."""

from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Float, Float32, Int32

from layers.experts import Experts
from layers.mlp import SwiGLU
from layers.router import Router


class MoEStats(NamedTuple):
    """What a layer says of a batch; each may carry a leading dim of layers.

    Choices that fell on each expert, how many of all were dropped, and the balance loss of each sequence.
    """

    counts: Int32[Array, "*layers e"]
    dropped: Int32[Array, "*layers"]
    balance_loss: Float32[Array, "*layers b"]


class MoE(eqx.Module):
    """`experts(x)` weighted by the router, plus `shared(x)`, which every token passes (None: no shared expert)."""

    router: Router
    experts: Experts
    shared: SwiGLU | None

    def __call__(self, x: Float[Array, "batch seq dim"]) -> tuple[Float[Array, "batch seq dim"], MoEStats]:
        routing = self.router(x)
        y, dropped = self.experts(x, routing.weights, routing.chosen)
        stats = MoEStats(routing.counts, dropped, routing.balance_loss)
        return (y if self.shared is None else y + self.shared(x)), stats
