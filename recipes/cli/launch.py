"""From the command line to a job: Hydra composes, errors become a few lines and an exit code. Free of jax."""

import os
import re
import sys
from collections.abc import Callable

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from recipes import schema
from zoo.checks import ConfigError

BAD_CONFIGURATION = 2


def launch(command: str, job: Callable[[DictConfig], int]) -> None:
    """Runs `job` on the composed configuration and exits with its code; 2 for a configuration that cannot be."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us; Hydra's own report hides their cause
    schema.register()
    code, started = 0, False

    def task(tree: DictConfig) -> None:
        nonlocal code, started
        started = True
        try:
            code = job(tree)
        except (ConfigError, OmegaConfBaseException) as error:
            code = _report(command, error)

    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")(task)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if started:  # not about the configuration
            raise
        code = _report(command, error)
    sys.exit(code)


def explain(error: Exception) -> ConfigError:
    """What Hydra or OmegaConf found wrong, as a ConfigError that names key, value, what is allowed and near matches."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, OverrideParseException):
        return ConfigError("override", error.override, "not of the form KEY=VALUE or GROUP=NAME")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group and error.options:
            return ConfigError(group, name, "no such choice", allowed=sorted(error.options))
    cause = error.__cause__ or error
    override = re.search(r"override '?([^\s'=]+)(?:=([^\n]*))?", str(error))
    if override and not any(override[1] in word for word in sys.argv[1:]):
        override = None
    key, value = (override[1], override[2] or "") if override else (getattr(cause, "full_key", "") or "", "")
    value = value or _given(key)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        allowed = sorted(map(str, getattr(cause.parent_node, "keys", list)()))
        return ConfigError(key, value, "no such key", allowed=allowed, name=key.rpartition(".")[2])
    if override or key:
        return ConfigError(key, value, _first_line(cause))
    return ConfigError("configuration", " ".join(sys.argv[1:]), _first_line(error))


def _given(key: str) -> str:
    """The value of a key on the command line."""
    values = [word.partition("=")[2] for word in sys.argv[1:] if word.lstrip("+~").partition("=")[0] == key]
    return values[-1] if values else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _report(command: str, error: Exception) -> int:
    print(f"{command}: {explain(error)}", file=sys.stderr)
    return BAD_CONFIGURATION
