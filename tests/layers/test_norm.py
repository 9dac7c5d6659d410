"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.norm import RMSNorm
from tests import helpers, reference


@pytest.mark.parametrize("shape", [(1,), (3, 7), (1, 5, 8), (2, 3, 4, 16)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equals_the_oracle(shape, eps):
    norm, x = helpers.drawn(lambda: RMSNorm(shape[-1], eps=eps)), helpers.normal(1, *shape)
    expected = reference.rms_norm(helpers.wide(x), helpers.wide(norm.weight), eps)
    helpers.assert_close(helpers.jit(norm)(jnp.asarray(x)), expected, helpers.FLOAT32)


def test_a_row_of_zeros_stays_zero_with_finite_gradients():
    value, gradient = helpers.jit(jax.value_and_grad(lambda x: jnp.sum(RMSNorm(4)(x))))(np.zeros((2, 4), np.float32))
    assert value == 0
    helpers.assert_finite(gradient)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_statistics_are_float32_for_narrow_inputs(dtype):
    """The squares of values near 1000 overflow float16, and bfloat16 sums lose their small terms."""
    norm, x = helpers.cast((helpers.drawn(lambda: RMSNorm(512)), 1000 * helpers.normal(1, 4, 512)), dtype)
    y = helpers.jit(norm)(x)
    assert y.dtype == dtype
    expected = reference.rms_norm(helpers.wide(x), helpers.wide(norm.weight), 1e-6)
    # Rounded as normed, and again as the product with the weight.
    assert (abs(helpers.wide(y) - expected) <= 2 * helpers.BFLOAT16_ONCE * abs(expected)).all()
    sums = [e for e in helpers.equations(jax.make_jaxpr(norm)(x)) if e.primitive.name in ("reduce_sum", "rsqrt")]
    assert len(sums) == 2
    assert {result.aval.dtype.name for e in sums for result in e.outvars} == {"float32"}
