"""The tiny models whose outputs generate.py makes, as plain data. Sizes differ, so that no two dims can be mistaken."""

from dataclasses import dataclass
from typing import Any

# Sequences are longer than the original length. The ramp of YARN over the four pairs of 8 dims is 0, 0, 1/2, 1, with
# the betas of V2-Lite 0, 1, 1, 1 and with those of Kimi K2 0, 0, 1, 1: no beta could be left at its default. Under
# LLAMA3 one pair is kept, one lies between and one is divided by the factor.
LENGTH = 8
YARN = {"rope_type": "yarn", "original_max_position_embeddings": LENGTH, "rope_theta": 100.0}
YARN |= {"beta_fast": 0.3, "beta_slow": 0.05}
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": LENGTH, "rope_theta": 50.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 0.25, "high_freq_factor": 1.25}

MLA = {"num_attention_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
DEEPSEEK = {**MLA, "hidden_size": 20, "intermediate_size": 22, "moe_intermediate_size": 7, "first_k_dense_replace": 1}


@dataclass(frozen=True)
class Case:
    """A family of transformers' models, the length of the sequences, and what the configuration says."""

    family: str
    seq: int
    config: dict[str, Any]


LLAMA2 = {
    "hidden_size": 24,
    "intermediate_size": 31,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA3_TIED = {
    "hidden_size": 20,
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": LLAMA3,
}
LLAMA_YARN = {
    "hidden_size": 18,
    "intermediate_size": 25,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "rope_parameters": {**YARN, "factor": 4.0},
}
DEEPSEEK_V2_LITE = {
    **DEEPSEEK,
    "num_hidden_layers": 3,
    "q_lora_rank": None,
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "max_position_embeddings": 320,
    "rope_parameters": {**YARN, "beta_fast": 32, "beta_slow": 1}
    | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
}
DEEPSEEK_V2 = {
    **DEEPSEEK,
    "num_hidden_layers": 2,
    "q_lora_rank": 9,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
    "max_position_embeddings": 320,
    # The two differ, unlike the published ones, so that cosines and sines have a factor too.
    "rope_parameters": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    # Published configurations say these too, which transformers does not read.
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "moe_layer_freq": 1,
}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 9,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,  # not that of the latents' norms, which transformers leaves at 1e-6
    "num_nextn_predict_layers": 1,  # as published, though transformers writes no tensor of it
    "max_position_embeddings": 320,
    "rope_parameters": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
KIMI_K2 = {
    **DEEPSEEK,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "q_lora_rank": 11,
    "n_routed_experts": 14,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 384,
    "rope_parameters": {**YARN, "original_max_position_embeddings": 12, "rope_theta": 10.0}
    | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    # Published configurations say these too, which transformers does not read.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "ep_size": 1,
}

CASES = {
    "llama2": Case("llama", 7, LLAMA2),
    "llama3": Case("llama", 11, LLAMA3_TIED),
    "llama_yarn": Case("llama", 11, LLAMA_YARN),
    "deepseek_v2_lite": Case("deepseek_v2", 10, DEEPSEEK_V2_LITE),
    "deepseek_v2": Case("deepseek_v2", 10, DEEPSEEK_V2),
    "deepseek_v3": Case("deepseek_v3", 11, DEEPSEEK_V3),
    "kimi_k2": Case("deepseek_v3", 13, KIMI_K2),
}
