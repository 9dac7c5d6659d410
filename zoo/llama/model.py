"""Llama from its configuration."""

import dataclasses

import jax
from jaxtyping import PRNGKeyArray

from layers import Attention, DenseBlock, Embedding, RMSNorm, Rope, SwiGLU, build_stack
from zoo.base import Decoder, make_head, rope_config
from zoo.llama.config import LlamaConfig


def llama(config: LlamaConfig, *, key: PRNGKeyArray) -> Decoder:
    """A Llama with normally distributed weights of deviation `init_std`."""
    embed_key, stack_key, head_key = jax.random.split(key, 3)
    c = config
    return Decoder(
        embedding=Embedding(c.vocab_size, c.dim, std=c.init_std, key=embed_key),
        layers=build_stack(lambda _, key: _block(c, key=key), ["dense"] * c.num_layers, key=stack_key),
        norm=RMSNorm(c.dim, eps=c.norm_eps),
        head=make_head(c, key=head_key),
        rope=Rope(dim=c.head_dim, **dataclasses.asdict(c.rope)),
    )


def _block(c: LlamaConfig, *, key: PRNGKeyArray) -> DenseBlock:
    attention_key, mlp_key = jax.random.split(key)
    attention = Attention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim, std=c.init_std, key=attention_key)
    return DenseBlock(attention, SwiGLU(c.dim, c.mlp_dim, std=c.init_std, key=mlp_key), c.dim, eps=c.norm_eps)


def config_of(model: Decoder) -> LlamaConfig | None:
    """The configuration of a model, or of gradients of that shape; None if it is no Llama.

    Blocks are read from the first one.
    """
    block = model.layers.blocks[0]
    if not isinstance(block, DenseBlock) or not isinstance(block.attention, Attention):
        return None
    return LlamaConfig(
        vocab_size=model.embedding.weight.shape[0],
        dim=model.embedding.weight.shape[1],
        num_layers=len(model.layers.blocks),
        num_heads=block.attention.num_heads,
        num_kv_heads=block.attention.num_kv_heads,
        head_dim=model.rope.dim,
        mlp_dim=block.mlp.gate_proj.weight.shape[1],
        norm_eps=model.norm.eps,
        tied_embeddings=model.head is None,
        rope=rope_config(model.rope),
    )
