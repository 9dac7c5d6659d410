"""Set-up of every test: the CPU, shapes checked at run time, no implicit promotion of dtypes or ranks."""

import gc
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiling for the CPU, of programs that run for milliseconds: XLA makes its usual graph of
# them, but optimises no machine code (but see `usual_machine_code`), and what is compiled twice is kept.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers share it, and so do the processes that tests start
    compiled = tempfile.TemporaryDirectory(prefix="offload-zoo-tests-")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", compiled.name)

import jaxtyping

# Before any import of the packages: beartype then checks every annotated shape and dtype in them.
jaxtyping.install_import_hook(["layers", "zoo"], "beartype.beartype")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests.helpers import LONG  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # for the tests of meshes; all others run on the first
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# An example may compile, which takes seconds: no deadline. `long` draws other examples each time.
hypothesis.settings.register_profile("default", deadline=None, max_examples=15, derandomize=True, database=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("ZOO_PROFILE", "default"))


# Tracing makes objects by the million and few cycles of garbage: to look for these all the time is a tenth of all time.
gc.disable()


@pytest.fixture(autouse=True, scope="module")
def garbage():
    yield
    gc.collect()
    gc.freeze()  # what is left stays, mostly in caches


@pytest.fixture(autouse=True, scope="module")
def shapes(request):
    """Above layers and models, whose own tests check every shape, the checks are for the long profile: they take 7%."""
    above = "recipes" in request.path.parts
    jaxtyping.config.update("jaxtyping_disable", above and not LONG)


@pytest.fixture
def usual_machine_code():
    """For tests of numbers to the last bit, in the long profile."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before and not LONG)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
