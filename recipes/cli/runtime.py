"""JAX as the commands want it: compiled programs kept on disk, no tracebacks about libraries that are not needed."""

import logging
from pathlib import Path

from recipes.config import RunConfig


def prepare_jax(run: RunConfig) -> None:
    """Switches the persistent compilation cache on, and off the plugin's complaint where there is no GPU.

    Call it before the first JAX computation.
    """
    import jax

    if not Path("/dev/nvidiactl").exists():
        # The extra `plan-cuda` compiles for GPUs without their libraries, which the plugin misses at every start.
        logging.getLogger("jax._src.xla_bridge").addFilter(_not_the_plugin)
    if run.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(Path(run.compile_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _not_the_plugin(record: logging.LogRecord) -> bool:
    return "plugin configuration error" not in record.getMessage()
