"""All tolerances of the tests, each with its reason, and the comparisons that use them.

A tolerance bounds the largest difference in a leaf relative to the largest magnitude of the expected leaf. A leaf
expected to be zero must therefore be exactly zero, and an average cannot hide one wrong entry. Those named PEER bound
norms instead.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parent.parent
LONG = os.environ.get("ZOO_PROFILE") == "long"

# Where XLA keeps the machine code of GPU kernels, which many of the programs that are compiled share: half of the time.
# A file for each process; it is read after XLA has assigned all memory.
_KERNELS = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", tempfile.gettempdir())) / f"kernels-{os.getpid()}"
KERNELS: dict[str, str | bool] = {"xla_gpu_kernel_cache_file": str(_KERNELS)}

# Where temporaries are not compared: products by cuBLAS, since XLA compiles each of Triton's to see whether it can, a
# third of the rest. It may want another workspace. The long profile compiles as users do.
FEWER_KERNELS = KERNELS if LONG else KERNELS | {"xla_gpu_enable_triton_gemm": False}

# float32 against a float64 oracle, or two float32 programs that sum in another order: some 64 terms a sum and a few
# operations in a row, each rounded to 2^-24. Measured: at most 4e-6, in gradients.
FLOAT32 = 1e-5

# As FLOAT32 after a whole model: some thirty layers of operations in a row. Measured: at most 4e-6.
FLOAT32_MODEL = 2e-5

# As FLOAT32 for each row of a gradient by itself: a row may be a sum that nearly cancels, while what a device adds too
# much or not at all changes it by tenths. Measured: at most 3e-5.
FLOAT32_ROW = 1e-4

# bfloat16 against float32 on the same rounded weights: a handful of roundings to 2^-9 in a row. Measured: at most 7e-3.
BFLOAT16 = 2e-2

# As BFLOAT16 for gradients: the softmax's derivative subtracts numbers that nearly cancel. Measured: 2.6e-2 in MLA,
# where naive attention under automatic differentiation is off by 2.3e-2; elsewhere at most 1.4e-2.
BFLOAT16_GRADIENT = 5e-2

# One rounding to bfloat16 of a value known in float32: half a unit in the last place of 8 bits.
BFLOAT16_ONCE = 2**-8

# A float64 formula against another float64 formula: a few roundings to 2^-53.
FLOAT64 = 1e-13

# Angles of float32 positions up to 5000 are off by 5000 * 2^-24 radians; cosines and sines differ as much.
ROTATION_FAR = 3e-4

# Device temporaries of a placed program against those of the all-remat one, beside what the table adds: other fusions,
# another packing, and up to two layers' arrays on their way to or from the host. Measured: at most 1.02.
DEVICE_MEMORY = 1.1

# The next four bound differences from Hugging Face's transformers, but for the loss by `assert_close_in_norm`. Both
# compute in float32 and sum in another order. One module, a handful of operations in a row. Measured: at most 3e-7.
PEER_MODULE = 2e-6

# Logits after a whole model of two or three layers. Measured over random draws: at most 1.3e-6.
PEER_LOGITS = 2e-5

# The loss, absolute: a mean of some twenty numbers near 3, each known to 2^-23. Measured over draws: at most 7.2e-7.
PEER_LOSS = 1e-6

# A gradient, each parameter and expert by itself: twice the operations, and the softmax's derivative subtracts numbers
# that nearly cancel. Measured over draws: at most 1e-5.
PEER_GRADIENT = 1e-4


def jit(function: Any) -> Any:
    """`eqx.filter_jit` that compiles fast (in two thirds of the time) rather than well, for what runs once."""
    options: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 0}}
    return eqx.filter_jit(function, **options)


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Asserts equal structure and shapes and `max |a - e| <= tolerance * max |e|` in each leaf, naming the worst."""
    worst = max(_differences(actual, expected, _largest), default=(0.0, "no leaves"))
    assert worst[0] <= tolerance, f"{worst[1]}: largest difference {worst[0]:.3e} of the largest value > {tolerance:g}"


def assert_close_in_norm(actual: Any, expected: Any, tolerance: float) -> None:
    """Asserts equal structure and shapes and `|a - e| <= tolerance * |e|` in each leaf, `|x|` its Euclidean norm."""
    worst = max(_differences(actual, expected, np.linalg.norm), default=(0.0, "no leaves"))
    assert worst[0] <= tolerance, f"{worst[1]}: norm of the difference {worst[0]:.3e} of the norm > {tolerance:g}"


def _largest(x: np.ndarray) -> np.floating:
    return np.max(np.abs(x), initial=0.0)


def _differences(actual: Any, expected: Any, size: Callable[[np.ndarray], Any]) -> Iterator[tuple[float, str]]:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path) or "array"
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, f"{name}: {a.shape} is not {e.shape}"
        assert np.isfinite(e).all(), f"{name}: the expected values are not finite"
        difference, scale = size((a - e).ravel()), size(e.ravel())
        relative = 0.0 if difference == 0 else float(np.divide(difference, scale)) if scale else np.inf
        yield (relative if np.isfinite(relative) else np.inf), name


def assert_bit_equal(actual: Any, expected: Any) -> None:
    """Asserts equal structure, dtypes and bits, naming the first leaf that differs."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert a.dtype == e.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(a, e, err_msg=jax.tree_util.keystr(path))


def assert_finite(tree: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        assert np.isfinite(np.asarray(leaf, np.float64)).all(), f"{jax.tree_util.keystr(path)} is not finite"


def normal(seed: int, *shape: int) -> np.ndarray:
    """Float32 values of a standard normal distribution, drawn by NumPy so that no program is compiled for them."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def avals(jaxpr: Any) -> Iterator[Any]:
    """Abstract values of all results in a jaxpr and the jaxprs nested in it."""
    for equation in equations(jaxpr):
        yield from (result.aval for result in equation.outvars)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and the jaxprs nested in it."""
    for equation in jaxpr.eqns:
        yield equation
        for nested in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(nested):
                yield from equations(getattr(nested, "jaxpr", nested))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def drawn(make: Any, seed: int = 0, std: float = 0.3) -> Any:
    """The module that `make()` constructs, refilled without compiling: normal weights, vectors around one."""
    abstract = eqx.filter_eval_shape(make)
    leaves, structure = jax.tree.flatten(abstract)
    filled = [normal(seed + i, *leaf.shape) * std + (leaf.ndim == 1) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, [jnp.asarray(leaf, jnp.float32) for leaf in filled])


def cast(tree: Any, dtype: Any) -> Any:
    """The tree's leaves in another dtype, without compiling."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf).astype(dtype)), tree)


def host(tree: Any) -> Any:
    """The tree's leaves as NumPy arrays, which can be cut and compared without compiling."""
    return jax.tree.map(np.asarray, tree)


def wide(tree: Any) -> Any:
    """The tree's leaves as NumPy float64, for an oracle."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
