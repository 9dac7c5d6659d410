"""JAX as the commands want it: compiled programs kept on disk, no tracebacks about libraries that are not needed."""

import logging
from importlib import util
from pathlib import Path

from zoo.checks import ConfigError
from zoo.folders import takes_files


def prepare_jax(compile_cache: str | None) -> None:
    """Switches the persistent compilation cache on if there is a folder, and off the plugin's complaint without a GPU.

    Call it before the first JAX computation.
    """
    import jax

    if not Path("/dev/nvidiactl").exists():
        # The extra `plan-cuda` compiles for GPUs without their libraries, which the plugin misses at every start.
        logging.getLogger("jax._src.xla_bridge").addFilter(_not_the_plugin)
    if compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(Path(compile_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _not_the_plugin(record: logging.LogRecord) -> bool:
    return "plugin configuration error" not in record.getMessage()


def require_extra(command: str, extra: str, *packages: str) -> None:
    """Raises ConfigError unless the packages of an extra are there."""
    for package in packages:
        if util.find_spec(package) is None:
            hint = f"pip install 'offload-zoo[{extra}]'"
            raise ConfigError(package, "missing", f"{command} needs the extra [{extra}]", hint=hint)


def require_writable(key: str, file: str | None) -> None:
    """Raises ConfigError unless a command can write this file in the end; None: it need not."""
    if file is None:
        return
    folder = Path(file).absolute().parent
    if Path(file).is_dir():
        raise ConfigError(key, file, "is a folder")
    if not takes_files(folder):
        raise ConfigError(key, file, f"{folder} is not a folder that can be written")
