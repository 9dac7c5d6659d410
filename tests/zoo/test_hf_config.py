"""Configurations of the published models are read field by field; what would compute something else is refused."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings

import zoo
from tests.recipes.common import BEARTYPE_DRAWS
from tests.zoo.test_convert import deepseeks, llamas
from zoo.deepseek import hf as deepseek_hf
from zoo.hf import Fields
from zoo.llama import hf as llama_hf

COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
}
LLAMA2 = COMMON | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "vocab_size": 32000,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA3_1_8B = LLAMA2 | {
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA3_2_1B = LLAMA3_1_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA3_SCALING | {"factor": 32.0},
    "tie_word_embeddings": True,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = V3 | {
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_nextn_predict_layers": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
V2_LITE = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
PUBLISHED = {
    "llama2_7b": LLAMA2,
    "llama3_1_8b": LLAMA3_1_8B,
    "llama3_2_1b": LLAMA3_2_1B,
    "deepseek_v2_lite": V2_LITE,
    "deepseek_v2": V2,
    "deepseek_v3_671b": V3,
    "kimi_k2": KIMI_K2,
}


def read(fields: dict[str, Any]) -> Any:
    architecture = fields["architectures"][0]
    module = llama_hf if architecture in llama_hf.ARCHITECTURES else deepseek_hf
    reader = Fields(fields)
    config = module.read_config(reader, architecture)
    reader.finish()
    return config


def as_read(config: Any) -> Any:
    """Without what files do not say: how weights were drawn, and which groups one group is."""
    config = dataclasses.replace(config, init_std=0.02)
    router = getattr(config, "router", None)
    if router is not None and router.groups == 1:
        config = dataclasses.replace(config, router=dataclasses.replace(router, group_score="top2"))
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_those_of_the_zoo(name: str):
    announced = {"num_mtp_layers": 1} if name == "deepseek_v3_671b" else {}
    assert as_read(read(PUBLISHED[name])) == as_read(zoo.config(name, **announced))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_form_of_transformers_5_is_read_too(name: str):
    fields = dict(PUBLISHED[name])
    scaling = fields.pop("rope_scaling") or {"rope_type": "default"}
    fields["rope_parameters"] = scaling | {"rope_theta": fields.pop("rope_theta", 10000.0)}
    assert read(fields) == read(PUBLISHED[name])


@BEARTYPE_DRAWS
@settings(max_examples=100, deadline=None)
@given(config=llamas() | deepseeks())
def test_what_is_written_is_read_as_the_same(config: Any):
    module: Any = llama_hf if isinstance(config, zoo.LlamaConfig) else deepseek_hf
    assert as_read(read(module.write_config(config))) == as_read(config)


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_scaling": LLAMA3_SCALING | fields}


@pytest.mark.parametrize(
    ("fields", "changed", "message"),
    [
        (LLAMA2, {"attention_bias": True}, "attention_bias=True: is not supported; supported: False"),
        (LLAMA2, {"mlp_bias": True}, "mlp_bias=True"),
        (LLAMA2, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (LLAMA2, {"hidden_act": "gelu"}, "hidden_act=gelu: is not supported; supported: silu"),
        (LLAMA2, {"sliding_window": 4096}, "sliding_window=4096: is a field that this project does not know"),
        (LLAMA2, {"hidden_size": "big"}, "hidden_size=big: must be of type int"),
        (LLAMA2, {"hidden_size": None}, "hidden_size=null: is needed"),
        (LLAMA2, {"num_attention_heads": 0}, "num_heads=0: must be above zero"),
        (LLAMA2, {"num_key_value_heads": 3}, "must be divisible by num_kv_heads=3"),
        (LLAMA2, {"rope_scaling": "linear"}, "rope_scaling=linear: must be of type dict"),
        (LLAMA2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear: is not supported"),
        (LLAMA2, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        (LLAMA2, {"rope_scaling": {"type": "linear", "rope_type": "default"}}, "type=linear: is not supported"),
        (LLAMA2, {"rope_scaling": {"factor": 2.0}}, "rope_scaling: factor=2.0: is a field"),
        (LLAMA2, {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (LLAMA3_1_8B, rope(factor=None), "factor=null: is needed"),
        (LLAMA3_1_8B, rope(beta_fast=2.0), "beta_fast=2.0: is a field"),
        (V3, {"scoring_func": "softmax"}, "scoring_func=softmax"),
        (V3, {"topk_method": "greedy"}, "topk_method=greedy"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads=8"),
        (V3, {"n_group": 7}, "num_experts=256: must be divisible by router.groups=7"),
        (V3, {"num_experts_per_tok": None}, "num_experts_per_tok=null: is needed"),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": None}}, "mscale=1.0: stands without the other"),
        (V3, {"rope_scaling": YARN | {"attention_factor": 2.0}}, "attention_factor=2.0: is not supported"),
        (V3, {"rope_scaling": YARN | {"truncate": False}}, "truncate=False"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method=noaux_tc"),
        (V2, {"index_topk": 2048}, "index_topk=2048: is a field that this project does not know"),
    ],
)
def test_what_would_compute_something_else_is_refused(fields: dict[str, Any], changed: dict[str, Any], message: str):
    with pytest.raises(zoo.ConfigError, match=message):
        read(fields | changed)


def test_v2_scales_what_it_does_not_normalise():
    """DeepSeek's code of V2: normalised weights are not scaled."""
    router = read(V2 | {"norm_topk_prob": True}).router
    assert (router.normalize, router.scale) == (True, 1.0)


@pytest.mark.parametrize("given", [None, [], ["MistralForCausalLM"], ["LlamaForCausalLM", "other"], "LlamaForCausalLM"])
def test_other_architectures_are_refused(given: Any, tmp_path):
    from tests.zoo.weights_common import LLAMA, model, reconfigure
    from zoo.convert import open_weights

    zoo.export(model(LLAMA), tmp_path / "hf")
    reconfigure(tmp_path / "hf", architectures=given)
    with pytest.raises(zoo.ConfigError, match="allowed: LlamaForCausalLM, DeepseekV2ForCausalLM, DeepseekV3"):
        open_weights(tmp_path / "hf")


def test_a_router_of_neither_kind_has_no_file_format():
    config: Any = zoo.config("debug_deepseek", router={"affinity": "softmax"})
    with pytest.raises(zoo.ConfigError, match="neither that of DeepSeek V2 nor that of V3"):
        deepseek_hf.write_config(config)
