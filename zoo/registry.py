"""Models by name: `conf/model/NAME.yaml` holds the sizes, a family turns them into a model. Free of jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zoo import presets
from zoo.checks import flat_fields, from_fields
from zoo.deepseek.config import DeepSeekConfig
from zoo.llama.config import LlamaConfig

# A family `x` is a folder `zoo/x`: its configuration here, and in `zoo/x/model.py` a function `x(config, key=key)`.
FAMILIES: dict[str, type] = {"llama": LlamaConfig, "deepseek": DeepSeekConfig}
_NOT_OF_THE_WEIGHTS = ("init_std", "capacity_factor")
ModelConfig = Any  # a configuration of one of the families, a frozen dataclass


def names() -> list[str]:
    """The models that `conf/model` describes."""
    return presets.names("model")


def config(model: str | ModelConfig, **overrides: Any) -> ModelConfig:
    """The configuration of a model by name (or a configuration itself) with fields replaced.

    Of a nested one, such as `rope={"theta": 5e5}`, the fields that are not named stay.

    Raises ConfigError for an unknown name, an unknown field or a value that the model cannot have.
    """
    if isinstance(model, str):
        family, fields = _read(model)
        return from_fields(FAMILIES[family], _merged(fields, overrides), "model")
    return from_fields(type(model), _merged(dataclasses.asdict(model), overrides), "model")


def family_of(config: ModelConfig) -> str:
    """The name of the family that a configuration belongs to."""
    (family,) = (name for name, kind in FAMILIES.items() if type(config) is kind)
    return family


def differences(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """The fields in which two models of a family differ, with both values, nested ones as `rope.theta`.

    Only those that have to do with the weights: not how these are drawn, nor what share of choices training drops.
    """
    old, new = (flat_fields(dataclasses.asdict(each)) for each in (one, other))
    names = [name for name in old | new if name not in _NOT_OF_THE_WEIGHTS]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def _read(name: str) -> tuple[str, dict[str, Any]]:
    (schema, _), fields = presets.read("model", name, "model")  # `_self_` follows the schema, which is the family's
    return schema.removeprefix("/family/").removesuffix("@_here_"), fields


def _merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in overrides.items():
        old = merged.get(name)
        merged[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
