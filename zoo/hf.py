"""What the Hugging Face configurations and tensor names of both families share. Free of jax."""

from collections.abc import Iterator
from typing import Any

from zoo.checks import ConfigError
from zoo.rope import RopeConfig
from zoo.weights import Rule

# Fields without effect on what the model computes: bookkeeping, generation, training of others.
IGNORED = frozenset(
    "_name_or_path add_cross_attention architectures auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens "
    "bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty "
    "do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id ep_size exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range label2id length_penalty "
    "max_length max_position_embeddings max_sequence_length min_length model_type no_repeat_ngram_size num_beam_groups "
    "num_beams num_return_sequences output_attentions output_hidden_states output_router_logits output_scores "
    "pad_token_id prefix pretraining_tp problem_type pruned_heads quantization_config remove_invalid_values "
    "repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef sep_token_id seq_aux "
    "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k "
    "top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 "
    "use_cache".split()
)
REQUIRED = object()


class Fields:
    """The fields of a `config.json`, each taken once; `finish` raises for those that nobody took."""

    def __init__(self, fields: dict[str, Any], prefix: str = "config.json"):
        self._fields, self._prefix = dict(fields), prefix

    def integer(self, name: str, default: Any = REQUIRED) -> Any:
        return self._take(name, int, default)

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        return self._take(name, float, default)

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        return self._take(name, bool, default)

    def word(self, name: str, default: Any = REQUIRED) -> Any:
        return self._take(name, str, default)

    def fields(self, name: str) -> dict[str, Any]:
        return self._take(name, dict, {})

    def only(self, name: str, *allowed: Any) -> None:
        """Raises ConfigError if the field is there with a value that this project does not compute."""
        value = self._fields.pop(name, None)
        if value is not None and value not in allowed:
            supported = ", ".join(map(str, allowed)) or "null"
            raise ConfigError(f"{self._prefix}: {name}", value, f"is not supported; supported: {supported}")

    def finish(self, *ignored: str) -> None:
        for name, value in self._fields.items():
            if name not in IGNORED.union(ignored) and value is not None:
                raise ConfigError(f"{self._prefix}: {name}", value, "is a field that this project does not know")

    def _take(self, name: str, kind: type, default: Any) -> Any:
        """The value; `default` where it is absent or null. Raises ConfigError if there must be one, of this type."""
        value = self._fields.pop(name, None)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self._prefix}: {name}", "null", "is needed")
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ConfigError(f"{self._prefix}: {name}", value, f"must be of type {kind.__name__}")
        return value


def require_plain(fields: Fields) -> None:
    """Raises ConfigError for what no family here has: another activation, biases, dropout."""
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("attention_dropout", 0)


def take_rope(fields: Fields, layout: str) -> RopeConfig:
    """From `rope_theta` and `rope_scaling`, or `rope_parameters` as transformers 5 writes them."""
    given = {**fields.fields("rope_scaling"), **fields.fields("rope_parameters")}
    theta, length = fields.number("rope_theta", 10000.0), fields.integer("max_position_embeddings", 0)
    rope = Fields(given, "config.json: rope_scaling")
    kind = rope.word("rope_type", given.get("type") or "default")
    rope.only("type", kind)
    common: dict[str, Any] = {"theta": rope.number("rope_theta", theta), "layout": layout}
    rope.only("partial_rotary_factor", 1)
    if kind == "default":
        found = RopeConfig(**common)
    elif kind in ("llama3", "yarn"):
        # As transformers does, take the length that the model serves where the original one is not given.
        length = rope.integer("original_max_position_embeddings", length)
        common |= {"scaling": kind, "factor": rope.number("factor"), "original_length": length}
        found = _llama3(rope, common) if kind == "llama3" else _yarn(rope, common)
    else:
        problem = "is not supported; supported: default, llama3, yarn"
        raise ConfigError("config.json: rope_scaling.rope_type", kind, problem)
    rope.finish()
    return found


def _llama3(rope: Fields, common: dict[str, Any]) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    return RopeConfig(**common, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Fields, common: dict[str, Any]) -> RopeConfig:
    rope.only("truncate", True)
    rope.only("attention_factor")
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if bool(mscale) != bool(all_dim):
        name = "mscale" if mscale else "mscale_all_dim"
        problem = "stands without the other of mscale and mscale_all_dim: implementations differ in what that means"
        raise ConfigError(f"config.json: rope_scaling.{name}", mscale or all_dim, problem)
    scales = {"mscale": mscale, "mscale_all_dim": all_dim} if mscale else {}
    return RopeConfig(**common, beta_fast=fast, beta_slow=slow, **scales)


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {
        "rope_type": rope.scaling,
        "type": rope.scaling,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
    }
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    else:
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.mscale_all_dim:
            scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "max_position_embeddings": round(rope.factor * rope.original_length),
    }


def decoder_rules(tied: bool, depths: tuple[str, ...] = ()) -> Iterator[Rule]:
    """Embedding, last norm and head; each of `depths` (a prefix of multi-token prediction) may hold copies of both."""
    heads = tuple(f"{prefix}.shared_head.head.weight" for prefix in depths)
    embeddings = tuple(f"{prefix}.embed_tokens.weight" for prefix in depths)
    tied_copies = ("lm_head.weight", *heads) if tied else ()
    yield Rule("embedding.weight", ("model.embed_tokens.weight",), copies=embeddings + tied_copies)
    yield Rule("norm.weight", ("model.norm.weight",))
    if not tied:
        yield Rule("head.weight", ("lm_head.weight",), transposed=True, copies=heads)


def linear(path: str, name: str) -> Rule:
    return Rule(f"{path}.weight", (f"{name}.weight",), transposed=True)


def swiglu_rules(path: str, name: str) -> Iterator[Rule]:
    for projection in ("gate_proj", "up_proj", "down_proj"):
        yield linear(f"{path}.{projection}", f"{name}.{projection}")
