"""From the command line to a job: Hydra composes, errors become a few lines and an exit code. Free of jax."""

import os
import re
import sys
from collections.abc import Callable

import hydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from recipes import schema
from zoo.checks import ConfigError

BAD_CONFIGURATION = 2


def launch(command: str, job: Callable[[DictConfig], int]) -> None:
    """Runs `job` on the composed configuration and exits with its code; 2 for a configuration that cannot be."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us; Hydra's own report hides their cause
    schema.register()
    code = 0

    def task(tree: DictConfig) -> None:
        nonlocal code
        try:
            code = job(tree)
        except ConfigError as error:
            code = _report(command, error)

    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")(task)()
    except ConfigError as error:
        code = _report(command, error)
    except (HydraException, OmegaConfBaseException) as error:
        code = _report(command, explain(error))
    sys.exit(code)


def explain(error: Exception) -> ConfigError:
    """What Hydra or OmegaConf found wrong, as a ConfigError that names key, value, what is allowed and near matches."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group and error.options:
            return ConfigError(group, name, "no such choice", allowed=sorted(error.options))
    cause = error.__cause__ or error
    override = re.search(r"(?:override |Could not override ')([^\s'=]+)(?:=([^\n]*))?", str(error))
    key, value = (override[1], override[2] or "") if override else (getattr(cause, "full_key", "") or "", "")
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        name = key.rpartition(".")[2]
        allowed = sorted(map(str, getattr(cause.parent_node, "keys", list)()))
        value = value or _given(key)
        return ConfigError(key, value, "no such key", allowed=allowed, name=name)
    if isinstance(cause, ValidationError) and key:
        return ConfigError(key, value or _given(key), _first_line(cause))
    return ConfigError(
        "configuration", _first_line(error), "cannot be read", hint="see --help for the form of overrides"
    )


def _given(key: str) -> str:
    """The value of a key on the command line."""
    values = [word.partition("=")[2] for word in sys.argv[1:] if word.lstrip("+~").partition("=")[0] == key]
    return values[-1] if values else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _report(command: str, error: ConfigError) -> int:
    print(f"{command}: {error}", file=sys.stderr)
    return BAD_CONFIGURATION
