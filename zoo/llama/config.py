"""Sizes of a Llama. Free of jax."""

from dataclasses import dataclass, field

from zoo.checks import MAX_LAYERS, ConfigError, require_at_most, require_divisible, require_positive
from zoo.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A Llama 2 or 3 (Touvron et al., arXiv 2302.13971; Dubey et al., arXiv 2407.21783)."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    init_std: float = 0.02
    rope: RopeConfig = field(default_factory=RopeConfig)

    def __post_init__(self):
        sizes = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "norm_eps")
        require_positive("model", self, *sizes, "init_std")
        require_at_most(MAX_LAYERS, "model", self, "num_layers")
        require_divisible("model", self, "num_heads", "num_kv_heads")
        if self.head_dim % 2:
            raise ConfigError("model.head_dim", self.head_dim, "must be even: rotary embedding turns pairs")
