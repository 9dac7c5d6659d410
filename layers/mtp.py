"""Multi-token prediction: a further block that predicts one token more ahead."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from layers.block import DenseBlock, MoEBlock
from layers.linear import Linear
from layers.norm import RMSNorm
from layers.rope import Rotation
from layers.stack import Stack


class MTP(eqx.Module):
    r"""$h^k_i = \mathrm{norm}(\mathrm{block}(W [\mathrm{norm}(e_{i+k}); \mathrm{norm}(h^{k-1}_i)]))$ at depth $k$.

    $e_{i+k}$ is the embedding of the token $k$ places ahead, $h^0$ the model's normalised hidden states; embedding and
    projection to logits are the model's own. The block stands in a `Stack` of its own, so it is placed like any other
    layer. Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, eq. 21-23; the order of the halves is that of its
    checkpoint (`enorm`, `hnorm`, `eh_proj`, `shared_head.norm`).
    """

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    projection: Linear
    layers: Stack
    norm: RMSNorm

    def __init__(
        self, block: DenseBlock | MoEBlock, dim: int, *, eps: float = 1e-6, std: float = 0.02, key: PRNGKeyArray
    ):
        self.embedding_norm, self.hidden_norm = RMSNorm(dim, eps=eps), RMSNorm(dim, eps=eps)
        self.projection = Linear(2 * dim, dim, std=std, dims=("embed", None), key=key)
        self.layers = Stack((block,))
        self.norm = RMSNorm(dim, eps=eps)

    def __call__(
        self,
        hidden: Float[Array, "batch seq dim"],
        embedded: Float[Array, "batch seq dim"],
        rotation: Rotation,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq dim"], tuple]:
        """Hidden states of this depth, normalised, and what the block reports."""
        x = self.projection(jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1))
        x, reports = self.layers(x, rotation, segment_ids)
        return self.norm(x), reports
