"""Hugging Face folders: `config.json` and safetensors, read and written."""

import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from layers.rope import Rope
from zoo.checks import ConfigError
from zoo.folders import Folder, copy
from zoo.hf import Fields
from zoo.models import abstract
from zoo.paths import flat
from zoo.registry import FAMILIES, ModelConfig, family_of
from zoo.source import Layout, Source
from zoo.tensors import Quantization, Spec, TensorFolder, read_json, write_tensors
from zoo.weights import check_copies, leaf_specs, read_leaf, read_rows, tensor_specs, to_tensors

CONFIG, TIED = "config.json", "lm_head.weight"
BESIDE = (
    "generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json chat_template.jinja merges.txt vocab.json tiktoken.model".split()
)


class HuggingFaceSource:
    """The weights of a Hugging Face folder. Nothing in it is executed, and only safetensors are read.

    Raises ConfigError for an architecture or a field of `config.json` that this project does not compute, and where
    tensors are missing, unknown, of another shape or unreadable: all of it before the first weight is read.
    """

    def __init__(self, folder: Path):
        fields = read_json(folder / CONFIG)
        architecture = _architecture(fields)
        family = _family(architecture)
        reader = Fields(fields)
        config = family.read_config(reader, architecture)
        reader.finish()
        self._tensors = TensorFolder(folder, _quantization(fields))
        names = dict(self._tensors.specs)
        self.notices: tuple[str, ...] = ()
        self.config: ModelConfig = self._with_mtp(config, names)
        self._drop_frequencies(family, names)
        fused = any(name.endswith("experts.gate_up_proj") for name in names)
        rules = list(family.rules(self.config, fused))
        shapes = {path: tuple(leaf.shape) for path, leaf in flat(abstract(self.config)).items()}
        self._rules = {rule.path: rule for rule in rules}
        assert self._rules.keys() == shapes.keys()
        self.specs: Mapping[str, Spec] = leaf_specs(rules, shapes, names)
        self.layout: Layout | None = Layout(fused, tuple(c for rule in rules for c in rule.copies if c in names))
        self.files: Mapping[str, Folder] = {
            name: folder / name for name in (CONFIG, *BESIDE) if (folder / name).is_file()
        }

    def read(self, path: str) -> np.ndarray:
        rule, tensors = self._rules[path], self._tensors
        check_copies(rule, tensors.specs, tensors.__getitem__)
        return read_leaf(rule, self.specs[path], tensors.__getitem__)

    def rows(self, path: str) -> Iterator[np.ndarray]:
        rule, tensors = self._rules[path], self._tensors
        return read_rows(rule, tensors.__getitem__) if rule.stacked else iter(self.read(path))

    def _with_mtp(self, config: ModelConfig, names: Mapping[str, Spec]) -> ModelConfig:
        """Depths of multi-token prediction are often announced and left out."""
        announced = getattr(config, "num_mtp_layers", 0)
        prefixes = tuple(f"model.layers.{config.num_layers + depth}." for depth in range(announced))
        # Where there is one of their tensors there must be all: missing ones are an error that names them.
        if not announced or any(name.startswith(prefixes) for name in names):
            return config
        self.notices += (f"{CONFIG} announces {announced} layer(s) of multi-token prediction; the files hold none",)
        return dataclasses.replace(config, num_mtp_layers=0)

    def _drop_frequencies(self, family: Any, names: dict[str, Spec]) -> None:
        """Old files repeat the rotary frequencies in every layer: they must be those of the configuration."""
        found = [name for name in family.frequencies(self.config) if name in names]
        if not found:
            return
        head_dim = getattr(self.config, "head_dim", 0)
        expected = Rope(dim=head_dim, **dataclasses.asdict(self.config.rope)).frequencies()
        for name in found:
            values = self._tensors[name].astype(np.float64)
            if values.shape != expected.shape or not np.allclose(values, expected, rtol=1e-2):
                raise ConfigError("tensor", name, f"holds other rotary frequencies than {CONFIG} gives")
            del names[name]
        self.notices += (f"{len(found)} tensors that repeat the rotary frequencies were checked and left out",)


def write(folder: Path, source: Source) -> None:
    """Writes the weights under Hugging Face's names, with `config.json` and what else belongs to them."""
    family = importlib.import_module(f"zoo.{family_of(source.config)}.hf")
    layout = source.layout or Layout()
    rules = list(family.rules(source.config, layout.fused_experts))
    if source.layout is None:
        layout = Layout(copies=tuple(copy for rule in rules for copy in rule.copies if copy != TIED))
    config = read_json(source.files[CONFIG]) if CONFIG in source.files else family.write_config(source.config)
    config.pop("quantization_config", None)  # the weights are dequantized
    if "dtype" not in config and "torch_dtype" not in config:
        config["torch_dtype"] = max((str(spec.dtype) for spec in source.specs.values()), key=_itemsize)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for name, file in source.files.items():
        if name != CONFIG:
            copy(file, folder)
    rules = [rule for rule in rules if rule.path in source.specs]  # not every leaf has a gradient
    specs = tensor_specs(rules, source.specs, layout.copies)
    write_tensors(folder, specs, to_tensors(rules, source.read, source.rows, layout.copies))


def _architecture(fields: Mapping[str, Any]) -> str:
    given = fields.get("architectures")
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
        raise ConfigError(f"{CONFIG}: architectures", given, "must name one architecture", allowed=_architectures())
    return given[0]


def _family(architecture: str) -> Any:
    for name in FAMILIES:
        module = importlib.import_module(f"zoo.{name}.hf")
        if architecture in module.ARCHITECTURES:
            return module
    problem = "is an architecture that this project does not have"
    raise ConfigError(f"{CONFIG}: architectures", architecture, problem, allowed=_architectures())


def _architectures() -> list[str]:
    return [each for name in FAMILIES for each in importlib.import_module(f"zoo.{name}.hf").ARCHITECTURES]


def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _quantization(fields: Mapping[str, Any]) -> Quantization | None:
    """Float8 in blocks, as DeepSeek publishes it; weights become the dtype that `config.json` names, or bfloat16."""
    given = fields.get("quantization_config")
    if given is None:
        return None
    known = Fields(given if isinstance(given, dict) else {}, f"{CONFIG}: quantization_config")
    known.only("quant_method", "fp8")
    known.only("fmt", "e4m3")
    known.only("activation_scheme", "dynamic")
    known.only("scale_fmt", "float", "ue8m0")
    block = given.get("weight_block_size") if isinstance(given, dict) else None
    known.only("weight_block_size", block)
    known.finish("modules_to_not_convert")  # their tensors are not float8, which is what counts
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        key = f"{CONFIG}: quantization_config.weight_block_size"
        raise ConfigError(key, block, "must be two sizes, such as [128, 128]")
    dtype = fields.get("torch_dtype") or fields.get("dtype") or "bfloat16"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ConfigError(f"{CONFIG}: torch_dtype", dtype, "must be float32, float16 or bfloat16")
    return Quantization((block[0], block[1]), np.dtype(jnp.dtype(dtype)))
