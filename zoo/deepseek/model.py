"""DeepSeek V2 and V3 from their configuration."""

import dataclasses

import jax
from jaxtyping import PRNGKeyArray

from layers import (
    MLA,
    MTP,
    CapacityDispatch,
    DenseBlock,
    Embedding,
    Experts,
    LocalDispatch,
    MoE,
    MoEBlock,
    RMSNorm,
    Rope,
    Router,
    SwiGLU,
    build_stack,
)
from zoo.base import Decoder, make_head, rope_config
from zoo.checks import ConfigError
from zoo.deepseek.config import DeepSeekConfig, RouterConfig


def deepseek(config: DeepSeekConfig, *, key: PRNGKeyArray) -> Decoder:
    """A DeepSeek with normally distributed weights of deviation `init_std`; its first layers are dense."""
    embed_key, stack_key, head_key, mtp_key = jax.random.split(key, 4)
    c = config
    rope = Rope(dim=c.rope_head_dim, **dataclasses.asdict(c.rope))
    kinds = ["dense"] * c.num_dense_layers + ["moe"] * (c.num_layers - c.num_dense_layers)
    return Decoder(
        embedding=Embedding(c.vocab_size, c.dim, std=c.init_std, key=embed_key),
        layers=build_stack(lambda kind, key: _block(c, kind, rope, key=key), kinds, key=stack_key),
        norm=RMSNorm(c.dim, eps=c.norm_eps),
        head=make_head(c, key=head_key),
        rope=rope,
        mtp=tuple(_mtp(c, rope, key=jax.random.fold_in(mtp_key, depth)) for depth in range(c.num_mtp_layers)),
    )


def _mtp(c: DeepSeekConfig, rope: Rope, *, key: PRNGKeyArray) -> MTP:
    projection_key, block_key = jax.random.split(key)
    return MTP(_block(c, "moe", rope, key=block_key), c.dim, eps=c.norm_eps, std=c.init_std, key=projection_key)


def _block(c: DeepSeekConfig, kind: str, rope: Rope, *, key: PRNGKeyArray) -> DenseBlock | MoEBlock:
    attention_key, mlp_key = jax.random.split(key)
    attention = MLA(
        c.dim,
        c.num_heads,
        query_rank=c.query_rank,
        kv_rank=c.kv_rank,
        nope_dim=c.nope_head_dim,
        rope_dim=c.rope_head_dim,
        value_dim=c.value_head_dim,
        softmax_factor=rope.softmax_factor,
        eps=1e-6,  # of the latents' norms: in DeepSeek's and Hugging Face's code it does not follow `norm_eps`
        std=c.init_std,
        key=attention_key,
    )
    if kind == "dense":
        return DenseBlock(attention, SwiGLU(c.dim, c.mlp_dim, std=c.init_std, key=mlp_key), c.dim, eps=c.norm_eps)
    return MoEBlock(attention, _moe(c, key=mlp_key), c.dim, eps=c.norm_eps)


def _moe(c: DeepSeekConfig, *, key: PRNGKeyArray) -> MoE:
    router_key, experts_key, shared_key = jax.random.split(key, 3)
    router = Router(
        c.dim, c.num_experts, c.experts_per_token, std=c.init_std, **dataclasses.asdict(c.router), key=router_key
    )
    dispatch = LocalDispatch() if c.capacity_factor is None else CapacityDispatch(c.capacity_factor)
    experts = Experts(c.dim, c.expert_dim, c.num_experts, dispatch=dispatch, std=c.init_std, key=experts_key)
    if not c.num_shared_experts:
        return MoE(router, experts, None)
    shared_dim = c.num_shared_experts * c.expert_dim
    return MoE(router, experts, SwiGLU(c.dim, shared_dim, std=c.init_std, prefix="shared", key=shared_key))


def config_of(model: Decoder) -> DeepSeekConfig | None:
    """The configuration of a model, or of gradients of that shape; None if it is no DeepSeek.

    Alike blocks are read from the first one. Raises ConfigError for a model without MoE blocks.
    """
    blocks = model.layers.blocks
    if not isinstance(blocks[0].attention, MLA):
        return None
    moe = next((block.moe for block in blocks if isinstance(block, MoEBlock)), None)
    dense = next((block.mlp for block in blocks if isinstance(block, DenseBlock)), None)
    attention, dim = blocks[0].attention, model.embedding.weight.shape[1]
    if moe is None:
        raise ConfigError("model", "all layers dense", "sizes of its experts are unknown")
    router, experts = moe.router, moe.experts
    hidden = experts.gate_proj.shape[2]
    return DeepSeekConfig(
        vocab_size=model.embedding.weight.shape[0],
        dim=dim,
        num_layers=len(blocks),
        num_dense_layers=sum(isinstance(block, DenseBlock) for block in blocks),
        num_heads=attention.num_heads,
        query_rank=None if attention.query_down is None else attention.query_down.weight.shape[1],
        kv_rank=attention.kv_rank,
        nope_head_dim=attention.nope_dim,
        rope_head_dim=model.rope.dim,
        value_head_dim=attention.out_proj.weight.shape[0] // attention.num_heads,
        mlp_dim=hidden if dense is None else dense.gate_proj.weight.shape[1],
        expert_dim=hidden,
        num_experts=experts.gate_proj.shape[0],
        experts_per_token=router.experts_per_token,
        num_shared_experts=0 if moe.shared is None else moe.shared.gate_proj.weight.shape[1] // hidden,
        num_mtp_layers=len(model.mtp),
        capacity_factor=experts.dispatch.factor if isinstance(experts.dispatch, CapacityDispatch) else None,
        norm_eps=model.norm.eps,
        tied_embeddings=model.head is None,
        rope=rope_config(model.rope),
        router=RouterConfig(
            affinity=router.affinity,
            selection_bias=router.bias is not None,
            groups=router.groups,
            groups_kept=router.groups_kept,
            group_score=router.group_score,
            normalize=router.normalize,
            scale=router.scale,
        ),
    )
