"""Llama as Hugging Face stores it (`LlamaForCausalLM`: Llama 2 and 3.x). Free of jax."""

from collections.abc import Iterator
from typing import Any

from zoo.hf import Fields, decoder_rules, linear, require_plain, rope_fields, swiglu_rules, take_rope
from zoo.llama.config import LlamaConfig
from zoo.weights import Rule

ARCHITECTURES = ("LlamaForCausalLM",)


def read_config(fields: Fields, architecture: str) -> LlamaConfig:
    """From `config.json`. Raises ConfigError for what this project does not compute."""
    require_plain(fields)
    dim, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return LlamaConfig(
        vocab_size=fields.integer("vocab_size"),
        dim=dim,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", dim // max(heads, 1)),
        mlp_dim=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        rope=take_rope(fields, "half"),
    )


def write_config(config: LlamaConfig) -> dict[str, Any]:
    c = config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.mlp_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "initializer_range": c.init_std,
        **rope_fields(c.rope),
    }


def rules(config: LlamaConfig, fused_experts: bool) -> Iterator[Rule]:
    yield from decoder_rules(config.tied_embeddings)
    for layer in range(config.num_layers):
        path, name = f"layers.blocks.{layer}", f"model.layers.{layer}"
        yield Rule(f"{path}.attention_norm.weight", (f"{name}.input_layernorm.weight",))
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
            yield linear(f"{path}.attention.{ours}_proj", f"{name}.self_attn.{theirs}_proj")
        yield Rule(f"{path}.mlp_norm.weight", (f"{name}.post_attention_layernorm.weight",))
        yield from swiglu_rules(f"{path}.mlp", f"{name}.mlp")


def frequencies(config: LlamaConfig) -> tuple[str, ...]:
    """Buffers of old files that only repeat the rotary frequencies."""
    return tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers))
