"""Tiny models with weights of every leaf, and Hugging Face folders of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

import zoo
from zoo.deepseek.config import DeepSeekConfig, RouterConfig
from zoo.llama.config import LlamaConfig
from zoo.rope import RopeConfig

LLAMA = LlamaConfig(vocab_size=11, dim=6, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=5)
DEEPSEEK = DeepSeekConfig(
    vocab_size=7,
    dim=6,
    num_layers=3,
    num_dense_layers=1,
    num_heads=2,
    query_rank=4,
    kv_rank=5,
    nope_head_dim=3,
    rope_head_dim=2,
    value_head_dim=5,
    mlp_dim=8,
    expert_dim=3,
    num_experts=4,
    experts_per_token=2,
    num_shared_experts=2,
    num_mtp_layers=1,
    rope=RopeConfig(
        layout="interleaved", scaling="yarn", factor=4.0, original_length=8, mscale=1.0, mscale_all_dim=1.0
    ),
    router=RouterConfig(groups=2, groups_kept=1),
)


def model(config: Any, dtype: Any = np.float32) -> Any:
    """Every leaf differs from every other one; buffers are float32."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        kind = np.float32 if "bias" in jax.tree_util.keystr(path) else dtype
        return rng.standard_normal(leaf.shape).astype(kind)

    return jax.tree.map_with_path(draw, zoo.abstract(config))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by the library."""
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(file)
    return found


def rewrite(folder: Path, changed: Mapping[str, np.ndarray | None]) -> None:
    """Adds, replaces or (None) removes tensors of a folder of one file."""
    store(folder, {name: value for name, value in ({**tensors(folder), **changed}).items() if value is not None})


def store(folder: Path, values: dict[str, np.ndarray]) -> None:
    """Writes the one file of a folder anew."""
    safetensors.numpy.save_file(values, folder / "model.safetensors")


def reconfigure(folder: Path, **fields: Any) -> None:
    """Sets fields of `config.json`; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def bits(tree: Any) -> Any:
    """The leaves as integers of their width: equal only if they are so to the bit."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).view(f"u{np.asarray(leaf).dtype.itemsize}"), tree)


FLOAT8 = ml_dtypes.float8_e4m3fn
