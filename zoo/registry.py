"""Models by name: `conf/model/NAME.yaml` holds the sizes, a family turns them into a model. Free of jax."""

import dataclasses
from importlib import resources
from typing import Any

import yaml

from zoo.checks import ConfigError, from_fields
from zoo.deepseek.config import DeepSeekConfig
from zoo.llama.config import LlamaConfig

ModelConfig = LlamaConfig | DeepSeekConfig

FAMILIES: dict[str, type] = {"llama": LlamaConfig, "deepseek": DeepSeekConfig}


def names() -> list[str]:
    """The models that `conf/model` describes."""
    files = resources.files("conf").joinpath("model").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def config(model: str | ModelConfig, **overrides: Any) -> ModelConfig:
    """The configuration of a model by name (or a configuration itself) with fields replaced.

    Raises ConfigError for an unknown name, an unknown field or a value that the model cannot have.
    """
    if isinstance(model, str):
        family, fields = _read(model)
        return from_fields(FAMILIES[family], {**fields, **overrides}, "model")
    return from_fields(type(model), {**_shallow(model), **overrides}, "model")


def _read(name: str) -> tuple[str, dict[str, Any]]:
    if name not in names():
        raise ConfigError("model", name, "no such model", allowed=names())
    fields = yaml.safe_load(resources.files("conf").joinpath("model", f"{name}.yaml").read_text())
    (schema, _) = fields.pop("defaults")  # Hydra's way to say the family; `_self_` follows
    return schema.removeprefix("/family/").removesuffix("@_here_"), fields


def _shallow(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
