"""Models of two families, from frozen configurations. Importing this package does not import jax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layers.tag import tags as tags
    from zoo.base import Decoder as Decoder, Output as Output
    from zoo.checks import ConfigError as ConfigError
    from zoo.deepseek.config import DeepSeekConfig as DeepSeekConfig, RouterConfig as RouterConfig
    from zoo.llama.config import LlamaConfig as LlamaConfig
    from zoo.models import abstract as abstract, build as build, count_parameters as count_parameters
    from zoo.registry import config as config, names as names
    from zoo.rope import RopeConfig as RopeConfig

_HOMES = {
    "tags": "layers.tag",
    "Decoder": "zoo.base",
    "Output": "zoo.base",
    "abstract": "zoo.models",
    "build": "zoo.models",
    "count_parameters": "zoo.models",
    "ConfigError": "zoo.checks",
    "RopeConfig": "zoo.rope",
    "DeepSeekConfig": "zoo.deepseek.config",
    "RouterConfig": "zoo.deepseek.config",
    "LlamaConfig": "zoo.llama.config",
    "config": "zoo.registry",
    "names": "zoo.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module zoo has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
