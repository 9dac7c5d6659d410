"""DeepSeek V2 and V3 as Hugging Face stores them, Kimi K2 included. Free of jax."""

from collections.abc import Iterator
from typing import Any

from zoo.checks import ConfigError
from zoo.deepseek.config import DeepSeekConfig, RouterConfig
from zoo.hf import Fields, decoder_rules, linear, require_plain, rope_fields, swiglu_rules, take_rope
from zoo.weights import Rule

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def read_config(fields: Fields, architecture: str) -> DeepSeekConfig:
    """From `config.json`. Raises ConfigError for what this project does not compute.

    `num_mtp_layers` is what the configuration announces; the published files may hold fewer.
    """
    require_plain(fields)
    fields.only("moe_layer_freq", 1)
    heads, layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    choices = fields.integer("num_experts_per_tok")
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    fields.only("num_key_value_heads", heads)
    fields.only("qk_head_dim", nope + rope)
    fields.only("head_dim", rope)
    layout = "interleaved" if fields.flag("rope_interleave", True) else "half"
    mtp = fields.integer("num_mtp_layers", 0)
    return DeepSeekConfig(
        vocab_size=fields.integer("vocab_size"),
        dim=fields.integer("hidden_size"),
        num_layers=layers,
        num_dense_layers=min(fields.integer("first_k_dense_replace", 0), layers),
        num_heads=heads,
        query_rank=fields.integer("q_lora_rank", None),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=fields.integer("v_head_dim"),
        mlp_dim=fields.integer("intermediate_size"),
        expert_dim=fields.integer("moe_intermediate_size"),
        num_experts=fields.integer("n_routed_experts"),
        experts_per_token=choices,
        num_shared_experts=fields.integer("n_shared_experts", 0),
        num_mtp_layers=fields.integer("num_nextn_predict_layers", mtp),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        rope=take_rope(fields, layout),
        router=_read_v3(fields) if architecture == "DeepseekV3ForCausalLM" else _read_v2(fields, choices),
    )


def _read_v3(fields: Fields) -> RouterConfig:
    fields.only("topk_method", "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    return RouterConfig(
        groups=fields.integer("n_group", 1),
        groups_kept=fields.integer("topk_group", 1),
        normalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def _read_v2(fields: Fields, choices: int) -> RouterConfig:
    method = fields.word("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        problem = "is not supported; supported: greedy, group_limited_greedy"
        raise ConfigError("config.json: topk_method", method, problem)
    fields.only("scoring_func", "softmax")
    groups, kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    # DeepSeek's own code of V2 normalises only what it does not scale (Hugging Face's has no such case).
    normalize = fields.flag("norm_topk_prob", False) and choices > 1
    scale = fields.number("routed_scaling_factor", 1.0)
    limited = method == "group_limited_greedy"
    return RouterConfig(
        affinity="softmax",
        selection_bias=False,
        groups=groups if limited else 1,
        groups_kept=kept if limited else 1,
        group_score="max",
        normalize=normalize,
        scale=1.0 if normalize else scale,
    )


def write_config(config: DeepSeekConfig) -> dict[str, Any]:
    """Raises ConfigError for a router that is neither that of V2 nor that of V3."""
    c, r = config, config.router
    v3 = r.affinity == "sigmoid" and r.selection_bias and (r.groups == 1 or r.group_score == "top2")
    v2 = r.affinity == "softmax" and not r.selection_bias and (r.groups == 1 or r.group_score == "max")
    if not (v3 or (v2 and (r.scale == 1 or not r.normalize))):
        raise ConfigError("model.router", r, "is neither that of DeepSeek V2 nor that of V3: no file format exists")
    method = "noaux_tc" if v3 else "greedy" if r.groups == 1 else "group_limited_greedy"
    return {
        "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if v3 else "deepseek_v2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "first_k_dense_replace": c.num_dense_layers,
        "moe_layer_freq": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "q_lora_rank": c.query_rank,
        "kv_lora_rank": c.kv_rank,
        "qk_nope_head_dim": c.nope_head_dim,
        "qk_rope_head_dim": c.rope_head_dim,
        "v_head_dim": c.value_head_dim,
        "intermediate_size": c.mlp_dim,
        "moe_intermediate_size": c.expert_dim,
        "n_routed_experts": c.num_experts,
        "num_experts_per_tok": c.experts_per_token,
        "n_shared_experts": c.num_shared_experts or None,
        "n_group": r.groups,
        "topk_group": r.groups_kept,
        "topk_method": method,
        "scoring_func": r.affinity,
        "norm_topk_prob": r.normalize,
        "routed_scaling_factor": r.scale,
        "num_nextn_predict_layers": c.num_mtp_layers,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "initializer_range": c.init_std,
        "rope_interleave": c.rope.layout == "interleaved",
        **rope_fields(c.rope),
    }


def rules(config: DeepSeekConfig, fused_experts: bool) -> Iterator[Rule]:
    """`fused_experts`: gate and up of all experts of a layer stand in one tensor, as transformers 5 holds them."""
    c = config
    depths = tuple(f"model.layers.{c.num_layers + depth}" for depth in range(c.num_mtp_layers))
    yield from decoder_rules(c.tied_embeddings, depths)
    for layer in range(c.num_layers):
        path = f"layers.blocks.{layer}"
        yield from _block(c, path, f"model.layers.{layer}", layer < c.num_dense_layers, fused_experts)
    for depth, name in enumerate(depths):
        path = f"mtp.{depth}"
        yield Rule(f"{path}.embedding_norm.weight", (f"{name}.enorm.weight",))
        yield Rule(f"{path}.hidden_norm.weight", (f"{name}.hnorm.weight",))
        yield linear(f"{path}.projection", f"{name}.eh_proj")
        yield from _block(c, f"{path}.layers.blocks.0", name, False, fused_experts)
        yield Rule(f"{path}.norm.weight", (f"{name}.shared_head.norm.weight",))


def _block(c: DeepSeekConfig, path: str, name: str, dense: bool, fused_experts: bool) -> Iterator[Rule]:
    yield Rule(f"{path}.attention_norm.weight", (f"{name}.input_layernorm.weight",))
    yield from _attention(c, f"{path}.attention", f"{name}.self_attn")
    norm = f"{path}.mlp_norm" if dense else f"{path}.moe_norm"
    yield Rule(f"{norm}.weight", (f"{name}.post_attention_layernorm.weight",))
    if dense:
        yield from swiglu_rules(f"{path}.mlp", f"{name}.mlp")
    else:
        yield from _moe(c, f"{path}.moe", f"{name}.mlp", fused_experts)


def _attention(c: DeepSeekConfig, path: str, name: str) -> Iterator[Rule]:
    if c.query_rank is None:
        yield linear(f"{path}.query_up", f"{name}.q_proj")
    else:
        yield linear(f"{path}.query_down", f"{name}.q_a_proj")
        yield Rule(f"{path}.query_norm.weight", (f"{name}.q_a_layernorm.weight",))
        yield linear(f"{path}.query_up", f"{name}.q_b_proj")
    yield linear(f"{path}.kv_down", f"{name}.kv_a_proj_with_mqa")
    yield Rule(f"{path}.kv_norm.weight", (f"{name}.kv_a_layernorm.weight",))
    yield linear(f"{path}.kv_up", f"{name}.kv_b_proj")
    yield linear(f"{path}.out_proj", f"{name}.o_proj")


def _moe(c: DeepSeekConfig, path: str, name: str, fused_experts: bool) -> Iterator[Rule]:
    yield linear(f"{path}.router", f"{name}.gate")
    if c.router.selection_bias:
        yield Rule(f"{path}.router.bias.value", (f"{name}.gate.e_score_correction_bias",))
    if fused_experts:
        both = (f"{name}.experts.gate_up_proj",)
        yield Rule(f"{path}.experts.gate_proj", both, transposed=True, part=(0, 2))
        yield Rule(f"{path}.experts.up_proj", both, transposed=True, part=(1, 2))
        yield Rule(f"{path}.experts.down_proj", (f"{name}.experts.down_proj",), transposed=True)
    else:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = tuple(f"{name}.experts.{expert}.{projection}.weight" for expert in range(c.num_experts))
            yield Rule(f"{path}.experts.{projection}", names, transposed=True, stacked=True)
    if c.num_shared_experts:
        yield from swiglu_rules(f"{path}.shared", f"{name}.shared_experts")


def frequencies(config: DeepSeekConfig) -> tuple[str, ...]:
    """No file of this family repeats the rotary frequencies."""
    return ()
