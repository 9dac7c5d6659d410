"""Named configurations: the files `conf/GROUP/NAME.yaml`, read without Hydra. Free of jax."""

from importlib import resources
from typing import Any

from zoo.checks import ConfigError


def names(group: str) -> list[str]:
    """The names that a group of `conf` offers."""
    files = resources.files("conf").joinpath(group).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read(group: str, name: str, kind: str) -> tuple[list[str], dict[str, Any]]:
    """`(defaults, fields)` of one file: Hydra's defaults list, which names the schema, and the rest.

    Raises ConfigError with "no such `kind`" for an unknown name.
    """
    import yaml  # comes with Hydra, which a configuration made in Python does not need

    if name not in names(group):
        raise ConfigError(group, name, f"no such {kind}", allowed=names(group))
    fields = yaml.safe_load(resources.files("conf").joinpath(group, f"{name}.yaml").read_text())
    return fields.pop("defaults", []), fields
