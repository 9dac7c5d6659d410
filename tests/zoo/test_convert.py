"""Weights survive every way out and in again, to the bit."""

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import zoo
from tests import helpers
from tests.recipes.common import BEARTYPE_DRAWS
from tests.zoo.weights_common import DEEPSEEK, LLAMA, model, reconfigure, rewrite, tensors
from zoo import checkpoint, huggingface, tensors as tensors_module
from zoo.checkpoint import CheckpointSource
from zoo.convert import convert, open_weights
from zoo.deepseek.config import DeepSeekConfig, RouterConfig
from zoo.huggingface import HuggingFaceSource
from zoo.llama.config import LlamaConfig
from zoo.rope import RopeConfig
from zoo.source import config_of

SIZES = st.integers(1, 5)
ROPES = st.sampled_from(
    [
        RopeConfig(),
        RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_length=64),
        RopeConfig(scaling="yarn", factor=4.0, original_length=16),
        RopeConfig(scaling="yarn", factor=40.0, original_length=16, mscale=0.7, mscale_all_dim=0.8, beta_fast=3.0),
    ]
)


@st.composite
def llamas(draw: st.DrawFn) -> LlamaConfig:
    kv_heads = draw(SIZES)
    return LlamaConfig(
        vocab_size=draw(SIZES),
        dim=draw(SIZES),
        num_layers=draw(st.integers(1, 3)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(SIZES),
        mlp_dim=draw(SIZES),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        tied_embeddings=draw(st.booleans()),
        rope=draw(ROPES),
    )


@st.composite
def deepseeks(draw: st.DrawFn) -> DeepSeekConfig:
    groups = draw(st.integers(1, 3))
    kept = draw(st.integers(1, groups))
    experts = groups * draw(st.integers(1, 3))
    v3, scale = draw(st.booleans()), draw(st.sampled_from([1.0, 2.5]))
    normalize = draw(st.booleans()) and (v3 or scale == 1)
    chosen = draw(st.integers(1, experts // groups * kept))
    layers = draw(st.integers(1, 3))
    return DeepSeekConfig(
        vocab_size=draw(SIZES),
        dim=draw(SIZES),
        num_layers=layers,
        num_dense_layers=draw(st.integers(0, layers - 1)),
        num_heads=draw(SIZES),
        query_rank=draw(st.none() | SIZES),
        kv_rank=draw(SIZES),
        nope_head_dim=draw(SIZES),
        rope_head_dim=2 * draw(SIZES),
        value_head_dim=draw(SIZES),
        mlp_dim=draw(SIZES),
        expert_dim=draw(SIZES),
        num_experts=experts,
        experts_per_token=chosen,
        num_shared_experts=draw(st.integers(0, 2)),
        num_mtp_layers=draw(st.integers(0, 2)),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        tied_embeddings=draw(st.booleans()),
        rope=draw(ROPES.filter(lambda rope: rope.scaling != "llama3")),
        router=RouterConfig(
            affinity="sigmoid" if v3 else "softmax",
            selection_bias=v3,
            groups=groups,
            groups_kept=kept,
            group_score="top2" if v3 else "max",
            normalize=normalize and (chosen > 1 or experts == 1),
            scale=scale,
        ),
    )


def same_computation(a: Any, b: Any) -> None:
    """Equal structure, static fields included, which say what is computed; the group score of one group does not."""
    assert jax.tree.structure(a) == jax.tree.structure(b)


@BEARTYPE_DRAWS
@settings(max_examples=60, deadline=None)
@given(config=llamas() | deepseeks())
def test_what_is_exported_loads_as_the_same_model(config: Any):
    original = model(config)
    with tempfile.TemporaryDirectory() as folder:
        zoo.export(original, f"{folder}/hf")
        loaded = zoo.load(f"{folder}/hf")
    groups = getattr(getattr(config, "router", None), "groups", 2)
    if groups > 1:
        same_computation(loaded, original)
    helpers.assert_bit_equal(jax.tree.leaves(loaded), jax.tree.leaves(original))


@BEARTYPE_DRAWS
@settings(max_examples=12, deadline=None)
@given(config=llamas() | deepseeks(), dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]))
def test_export_after_import_gives_back_every_tensor(config: Any, dtype: Any):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        zoo.export(model(config, dtype), root / "hf")
        convert(HuggingFaceSource(root / "hf"), checkpoint.write, root / "own")
        convert(CheckpointSource(root / "own"), huggingface.write, root / "again")
        before, after = tensors(root / "hf"), tensors(root / "again")
        assert json.loads((root / "hf/config.json").read_text()) == json.loads((root / "again/config.json").read_text())
        helpers.assert_bit_equal(jax.tree.leaves(zoo.load(root / "own")), jax.tree.leaves(zoo.load(root / "hf")))
    assert before.keys() == after.keys()
    helpers.assert_bit_equal(after, before)


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_a_configuration_is_read_from_the_model(config: Any):
    assert config_of(model(config)) == config


def test_a_saved_model_loads_in_the_dtype_asked_for(tmp_path):
    zoo.save(model(DEEPSEEK, ml_dtypes.bfloat16), tmp_path / "own")
    stored, wide = zoo.load(tmp_path / "own"), zoo.load(tmp_path / "own", jnp.float32)
    assert stored.embedding.weight.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}
    assert stored.layers.blocks[1].moe.router.bias.value.dtype == jnp.float32
    helpers.assert_bit_equal(wide.embedding.weight, stored.embedding.weight.astype(jnp.float32))


def test_experts_stored_as_one_tensor_are_split_and_joined_again(tmp_path):
    zoo.export(model(DEEPSEEK), tmp_path / "apart")
    zoo.export(model(DEEPSEEK), tmp_path / "fused")
    changed: dict[str, Any] = {}
    apart = tensors(tmp_path / "apart")
    for layer in (1, 2, 3):  # two MoE layers and the one of multi-token prediction
        name = f"model.layers.{layer}.mlp.experts"
        parts = {
            projection: np.stack([apart[f"{name}.{expert}.{projection}.weight"] for expert in range(4)])
            for projection in ("gate_proj", "up_proj", "down_proj")
        }
        changed[f"{name}.gate_up_proj"] = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
        changed[f"{name}.down_proj"] = parts["down_proj"]
        changed |= {f"{name}.{e}.{projection}.weight": None for e in range(4) for projection in parts}
    rewrite(tmp_path / "fused", changed)
    helpers.assert_bit_equal(zoo.load(tmp_path / "fused"), zoo.load(tmp_path / "apart"))
    convert(open_weights(tmp_path / "fused"), checkpoint.write, tmp_path / "own")
    convert(open_weights(tmp_path / "own"), huggingface.write, tmp_path / "again")
    helpers.assert_bit_equal(tensors(tmp_path / "again"), tensors(tmp_path / "fused"))


def test_shards_hold_what_one_file_would(tmp_path, monkeypatch):
    zoo.export(model(DEEPSEEK), tmp_path / "one")
    monkeypatch.setattr(tensors_module, "SHARD_BYTES", 1000)
    zoo.export(model(DEEPSEEK), tmp_path / "many")
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "many" / "model.safetensors").exists()
    helpers.assert_bit_equal(tensors(tmp_path / "many"), tensors(tmp_path / "one"))
    helpers.assert_bit_equal(zoo.load(tmp_path / "many"), zoo.load(tmp_path / "one"))


def test_gradients_are_exported_without_those_of_buffers(tmp_path):
    from layers import split_buffers

    original = model(DEEPSEEK)
    zoo.export(original, tmp_path / "model")
    zoo.export(split_buffers(original)[0], tmp_path / "gradients")
    missing = tensors(tmp_path / "model").keys() - tensors(tmp_path / "gradients").keys()
    assert missing == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}


def test_a_tied_head_may_stand_in_the_file_and_comes_back(tmp_path):
    tied = model(zoo.config(LLAMA, tied_embeddings=True))
    zoo.export(tied, tmp_path / "hf")
    assert "lm_head.weight" not in tensors(tmp_path / "hf")
    rewrite(tmp_path / "hf", {"lm_head.weight": tied.embedding.weight})
    helpers.assert_bit_equal(zoo.load(tmp_path / "hf").embedding.weight, jnp.asarray(tied.embedding.weight))
    convert(open_weights(tmp_path / "hf"), checkpoint.write, tmp_path / "own")
    convert(open_weights(tmp_path / "own"), huggingface.write, tmp_path / "again")
    helpers.assert_bit_equal(tensors(tmp_path / "again"), tensors(tmp_path / "hf"))


def test_announced_but_missing_prediction_layers_are_left_out_with_a_notice(tmp_path):
    zoo.export(model(DEEPSEEK), tmp_path / "hf")
    gone = [name for name in tensors(tmp_path / "hf") if name.startswith("model.layers.3.")]
    rewrite(tmp_path / "hf", dict.fromkeys(gone))
    source = open_weights(tmp_path / "hf")
    assert source.config == zoo.config(DEEPSEEK, num_mtp_layers=0)
    assert "announces 1 layer(s) of multi-token prediction" in source.notices[0]


def test_old_files_may_repeat_the_rotary_frequencies(tmp_path):
    zoo.export(model(LLAMA), tmp_path / "hf")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path / "hf", {name: np.asarray([1.0, 0.01], np.float32)})  # 10000^(-2i/4)
    assert "1 tensors that repeat the rotary frequencies" in open_weights(tmp_path / "hf").notices[0]
    rewrite(tmp_path / "hf", {name: np.asarray([1.0, 0.02], np.float32)})
    with pytest.raises(zoo.ConfigError, match="other rotary frequencies"):
        open_weights(tmp_path / "hf")


def test_what_belongs_to_the_weights_travels_with_them(tmp_path):
    zoo.export(model(LLAMA), tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "modeling_llama.py").write_text("raise SystemExit")
    reconfigure(tmp_path / "hf", eos_token_id=2)
    convert(open_weights(tmp_path / "hf"), checkpoint.write, tmp_path / "own")
    convert(open_weights(tmp_path / "own"), huggingface.write, tmp_path / "again")
    assert {file.name for file in (tmp_path / "again").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == 2
