"""Set-up of every test: the CPU, shapes checked at run time, no implicit promotion of dtypes or ranks."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jaxtyping

# Before any import of the packages: beartype then checks every annotated shape and dtype in them.
jaxtyping.install_import_hook(["layers", "zoo"], "beartype.beartype")

import hypothesis  # noqa: E402
import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # for the tests of meshes; all others run on the first
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# An example may compile, which takes seconds: no deadline. `long` draws other examples each time.
hypothesis.settings.register_profile("default", deadline=None, max_examples=15, derandomize=True, database=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("ZOO_PROFILE", "default"))
