"""Models of two families, from frozen configurations. Importing this package does not import jax."""

from typing import TYPE_CHECKING

from zoo.lazy import attributes

if TYPE_CHECKING:
    from layers.tag import tags as tags
    from zoo.base import Decoder as Decoder, Output as Output
    from zoo.checks import ConfigError as ConfigError
    from zoo.convert import export as export, load as load, save as save
    from zoo.deepseek.config import DeepSeekConfig as DeepSeekConfig, RouterConfig as RouterConfig
    from zoo.llama.config import LlamaConfig as LlamaConfig
    from zoo.models import abstract as abstract, build as build, count_parameters as count_parameters
    from zoo.registry import config as config, names as names
    from zoo.rope import RopeConfig as RopeConfig

__getattr__, __dir__ = attributes(
    __name__,
    {
        "layers.tag": ("tags",),
        "zoo.base": ("Decoder", "Output"),
        "zoo.checks": ("ConfigError",),
        "zoo.convert": ("export", "load", "save"),
        "zoo.deepseek.config": ("DeepSeekConfig", "RouterConfig"),
        "zoo.llama.config": ("LlamaConfig",),
        "zoo.models": ("abstract", "build", "count_parameters"),
        "zoo.registry": ("config", "names"),
        "zoo.rope": ("RopeConfig",),
    },
)
