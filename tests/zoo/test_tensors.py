"""Files that are not what they should be are refused, and nothing is written; float8 weights are dequantized."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import zoo
from tests import helpers
from tests.zoo.weights_common import DEEPSEEK, FLOAT8, LLAMA, model, reconfigure, rewrite, store, tensors
from zoo import checkpoint, tensors as tensors_module
from zoo.convert import convert, open_weights

NAME = "model.layers.0.mlp.up_proj.weight"
OTHER = "model.layers.1.mlp.up_proj.weight"
Damage = Callable[[Path], object]


def index(folder: Path, **changed: str) -> None:
    path = folder / tensors_module.INDEX
    content = json.loads(path.read_text())
    content["weight_map"] |= changed
    path.write_text(json.dumps(content))


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def cut(file: Path, by: int = 1) -> None:
    file.write_bytes(file.read_bytes()[:-by])


SINGLE: dict[str, tuple[Damage, str]] = {
    "a tensor less": (lambda f: rewrite(f, {NAME: None}), f"needed and not there: {NAME}"),
    "a tensor more": (
        lambda f: rewrite(f, {"extra.weight": np.ones(2, np.float32)}),
        "there and not used: extra.weight",
    ),
    "one for another": (
        lambda f: rewrite(f, {NAME: None, "typo": tensors(f)[NAME]}),
        f"needed and not there: {NAME}\nthere and not used: typo",
    ),
    "a bias": (lambda f: rewrite(f, {"model.layers.0.self_attn.q_proj.bias": np.ones(16, np.float32)}), "not used"),
    "another shape": (
        lambda f: rewrite(f, {NAME: np.ones((5, 7), np.float32)}),
        r"has shape \[5, 7\], the model needs \[5, 6\]",
    ),
    "integers": (lambda f: rewrite(f, {NAME: np.ones((5, 6), np.int32)}), "has dtype I32"),
    "float64": (lambda f: rewrite(f, {NAME: np.ones((5, 6))}), "has dtype F64"),
    "float8 without scales": (lambda f: rewrite(f, {NAME: np.ones((5, 6), FLOAT8)}), "has dtype F8_E4M3"),
    "a cut file": (lambda f: cut(f / "model.safetensors"), "no whole safetensors file"),
    "a cut header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{"),
        "no whole safetensors file",
    ),
    "an empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "no whole safetensors file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "a pickle alone": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "holds neither model.safetensors nor",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), "needs config.yaml"),
    "broken JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read"),
    "JSON of no object": (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
}
SHARDED: dict[str, tuple[Damage, str]] = {
    "a missing shard": (lambda f: first_shard(f).unlink(), "is missing"),
    "a cut shard": (lambda f: cut(first_shard(f), 9), "no whole safetensors file"),
    "a way out": (lambda f: index(f, **{NAME: "../other.safetensors"}), "no safetensors file of this folder"),
    "an absolute path": (lambda f: index(f, **{NAME: "/etc/other.safetensors"}), "no safetensors file of this folder"),
    "a pickle": (lambda f: index(f, **{NAME: "pytorch_model.bin"}), "no safetensors file of this folder"),
    "a wrong place": (
        lambda f: index(
            f, **{"model.norm.weight": json.loads((f / tensors_module.INDEX).read_text())["weight_map"][NAME]}
        ),
        "says that .* holds model.norm.weight, which it does not",
    ),
    "a name too many": (lambda f: index(f, nothing=first_shard(f).name), "holds nothing, which it does not"),
    "no map": (lambda f: (f / tensors_module.INDEX).write_text("{}"), "has no weight_map"),
}


def refused(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    with pytest.raises(zoo.ConfigError, match=message):
        convert(open_weights(folder), checkpoint.write, folder.parent / "out")
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(("damage", "message"), SINGLE.values(), ids=SINGLE)
def test_a_folder_that_does_not_fit_is_refused(damage: Damage, message: str, tmp_path):
    zoo.export(model(LLAMA), tmp_path / "hf")
    refused(tmp_path / "hf", damage, message)


@pytest.mark.parametrize(("damage", "message"), SHARDED.values(), ids=SHARDED)
def test_shards_that_do_not_fit_their_index_are_refused(damage: Damage, message: str, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_module, "SHARD_BYTES", 300)
    zoo.export(model(LLAMA), tmp_path / "hf")
    refused(tmp_path / "hf", damage, message)


def test_copies_that_differ_are_refused_while_reading_and_leave_nothing(tmp_path):
    zoo.export(model(DEEPSEEK), tmp_path / "hf")
    name = "model.layers.3.embed_tokens.weight"
    refused(
        tmp_path / "hf", lambda f: rewrite(f, {name: -tensors(f)[name]}), f"{name}: differs from model.embed_tokens"
    )


def test_experts_of_two_dtypes_are_refused(tmp_path):
    zoo.export(model(DEEPSEEK), tmp_path / "hf")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    half = {name: tensors(tmp_path / "hf")[name].astype(np.float16)}
    refused(tmp_path / "hf", lambda f: rewrite(f, half), f"{name}: has dtype float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_float8_weights_are_dequantized_in_blocks(dtype, tmp_path):
    zoo.export(model(DEEPSEEK), tmp_path / "hf")
    names = ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.1.mlp.experts.2.down_proj.weight")
    wide = np.dtype(dtype or ml_dtypes.bfloat16)
    values, expected = tensors(tmp_path / "hf"), {}
    for name in values:
        if "norm" not in name and "bias" not in name:
            values[name] = values[name].astype(wide)
    for seed, name in enumerate(names):
        weight = helpers.normal(seed, *values[name].shape).astype(FLOAT8)
        rows, columns = weight.shape
        scales = np.abs(helpers.normal(seed + 9, -(-rows // 4), -(-columns // 2))) + 0.1
        grid = np.asarray([[scales[i // 4, j // 2] for j in range(columns)] for i in range(rows)], np.float32)
        expected[name] = (weight.astype(np.float32) * grid).astype(wide)
        values |= {name: weight, f"{name}_scale_inv": scales}
    store(tmp_path / "hf", values)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 2]}
    reconfigure(tmp_path / "hf", quantization_config=quantization, torch_dtype=dtype)
    block = zoo.load(tmp_path / "hf").layers.blocks
    helpers.assert_bit_equal(np.asarray(block[0].attention.kv_down.weight), expected[names[0]].T)
    helpers.assert_bit_equal(np.asarray(block[1].moe.experts.down_proj[2]), expected[names[1]].T)
    scale = {f"{names[0]}_scale_inv": np.ones((1, 1), np.float32)}
    refused(tmp_path / "hf", lambda f: store(f, values | scale), "blocks need")
    vector = {names[0]: np.ones(3, FLOAT8), f"{names[0]}_scale_inv": np.ones(1, np.float32)}
    refused(tmp_path / "hf", lambda f: store(f, values | vector), r"has shape \[3\]; blocks of float8 are of matrices")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method=gptq: is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [1, 1], "bits": 4}, "bits=4: is a field"),
    ],
)
def test_other_quantizations_are_refused(fields, message, tmp_path):
    zoo.export(model(LLAMA), tmp_path / "hf")
    refused(tmp_path / "hf", lambda f: reconfigure(f, quantization_config=fields), message)
