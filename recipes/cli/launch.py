"""From the command line to a job: Hydra composes, errors become a few lines and an exit code. Free of jax."""

import os
import re
import sys
from collections.abc import Callable
from importlib import resources

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from recipes import schema
from zoo import presets
from zoo.checks import ConfigError

BAD_CONFIGURATION, INTERRUPTED = 2, 130


def launch(command: str, job: Callable[[DictConfig], int], config: str = "config") -> None:
    """Runs `job` on what `conf/<config>.yaml` composes and exits with its code; 2 for what cannot be."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us; Hydra's own report hides their cause
    schema.register()
    code, running = 0, False

    def task(tree: DictConfig) -> None:
        nonlocal code, running
        running = True
        try:
            result = job(tree)
        except (ConfigError, OmegaConfBaseException) as error:
            result = _report(command, error)
        code, running = max(code, result), False  # of several jobs (--multirun) the worst counts

    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config)(task)()
    except (HydraException, OmegaConfBaseException, RuntimeError, ValueError) as error:
        if running:  # not about the configuration
            raise
        code = _report(command, error)
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def explain(error: Exception) -> ConfigError:
    """What Hydra or OmegaConf found wrong, as a ConfigError that names key, value, what is allowed and near matches."""
    if isinstance(error, ConfigError):
        return error
    nameless = [word for word in sys.argv[1:] if not re.split("[=@]", word.lstrip("+~"))[0]]
    if nameless or isinstance(error, OverrideParseException):
        broken = error.override if isinstance(error, OverrideParseException) else nameless[0]
        return ConfigError("override", broken, "not of the form KEY=VALUE or GROUP=NAME")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group and error.options:
            return _no_choice() or ConfigError(group, name, "no such choice", allowed=sorted(error.options))
    cause = error.__cause__ or error
    key, value = _blamed(str(error)) or (getattr(cause, "full_key", "") or "", "")
    value = value or _given(key)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        allowed = sorted(map(str, getattr(cause.parent_node, "keys", list)()))
        return ConfigError(key, value, "no such key", allowed=allowed, name=str(cause.key))
    if key:
        return ConfigError(key, value, _first_line(cause))
    return _no_choice() or ConfigError("configuration", " ".join(sys.argv[1:]), _first_line(error))


def _overrides() -> list[tuple[str, str]]:
    """Key and value of each override on the command line, the last one first."""
    words = [word for word in reversed(sys.argv[1:]) if not word.startswith("-")]
    return [(key, value) for key, _, value in (word.lstrip("+~").partition("=") for word in words)]


def _blamed(message: str) -> tuple[str, str] | None:
    """The override that Hydra's message quotes, or else names by its key."""
    for key, value in _overrides():
        if f"{key}={value}" in message:
            return key, value
    for key, value in _overrides():
        if re.search(rf"(override|for|at) '?[+~]*{re.escape(key)}(?![\w.])|'{re.escape(key)}'", message):
            return key, value
    return None


def _no_choice() -> ConfigError | None:
    """The first override of a group by what none of its files is called: Hydra does not say which it is about."""
    for key, value in _overrides():
        if key.isidentifier() and resources.files("conf").joinpath(key).is_dir() and value not in presets.names(key):
            return ConfigError(key, value, "no such choice", allowed=presets.names(key))
    return None


def _given(key: str) -> str:
    """The value of a key on the command line."""
    return next((value for name, value in _overrides() if name == key), "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _report(command: str, error: Exception) -> int:
    print(f"{command}: {explain(error)}", file=sys.stderr)
    return BAD_CONFIGURATION
