"""Sizes of a DeepSeek V2 or V3. Free of jax."""

from dataclasses import dataclass, field

from zoo.checks import (
    MAX_LAYERS,
    ConfigError,
    require_at_most,
    require_choice,
    require_not_negative,
    require_positive,
)
from zoo.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Choice of experts; the fields are those of `layers.Router`."""

    affinity: str = "sigmoid"
    selection_bias: bool = True
    groups: int = 1
    groups_kept: int = 1
    group_score: str = "top2"
    normalize: bool = True
    scale: float = 1.0

    def __post_init__(self):
        require_choice("model.router.affinity", self.affinity, ("softmax", "sigmoid"))
        require_choice("model.router.group_score", self.group_score, ("max", "top2"))
        require_positive("model.router", self, "groups", "groups_kept", "scale")
        if self.groups_kept > self.groups:
            raise ConfigError("model.router.groups_kept", self.groups_kept, f"only {self.groups} groups exist")


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig:
    """MLA and mixture-of-experts layers after `num_dense_layers` dense ones (arXiv 2405.04434 and 2412.19437).

    - `query_rank` None: queries without a latent, as in V2-Lite.
    - `num_shared_experts` act as one of that many times `expert_dim`.
    - `num_mtp_layers`: depths of multi-token prediction, each an MoE layer after the others.
    - `capacity_factor`: an expert takes at most that many times the mean load, and what comes beyond is dropped; None
      never drops.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    mlp_dim: int
    expert_dim: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    num_mtp_layers: int = 0
    capacity_factor: float | None = None
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    init_std: float = 0.02
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(layout="interleaved"))
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self):
        require_positive("model", self, "vocab_size", "dim", "num_layers", "num_heads", "kv_rank", "nope_head_dim")
        require_positive("model", self, "rope_head_dim", "value_head_dim", "mlp_dim", "expert_dim", "norm_eps")
        require_positive("model", self, "num_experts", "experts_per_token", "init_std")
        if self.query_rank is not None:
            require_positive("model", self, "query_rank")
        if self.capacity_factor is not None:
            require_positive("model", self, "capacity_factor")
        require_not_negative("model", self, "num_dense_layers", "num_shared_experts", "num_mtp_layers")
        require_at_most(MAX_LAYERS, "model", self, "num_layers", "num_mtp_layers")
        if self.num_dense_layers > self.num_layers:
            raise ConfigError("model.num_dense_layers", self.num_dense_layers, f"only {self.num_layers} layers exist")
        if self.rope_head_dim % 2:
            raise ConfigError("model.rope_head_dim", self.rope_head_dim, "must be even: rotary embedding turns pairs")
        self._check_routing()

    def _check_routing(self) -> None:
        groups, kept = self.router.groups, self.router.groups_kept
        if self.num_experts % groups:
            raise ConfigError("model.num_experts", self.num_experts, f"must be divisible by router.groups={groups}")
        reachable = self.num_experts // groups * kept
        if self.experts_per_token > reachable:
            raise ConfigError("model.experts_per_token", self.experts_per_token, f"only {reachable} experts in reach")
        if self.experts_per_token == 1 and self.router.normalize and self.num_experts > 1:
            raise ConfigError(
                "model.experts_per_token",
                1,
                "with router.normalize the weight of the one expert is constant and the router gets no gradient",
                hint="set model.router.normalize=false",
            )
