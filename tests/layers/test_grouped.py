"""Grouped matrix product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.grouped import grouped_matmul
from tests import helpers


def naive(rows, weight, experts):
    return jnp.einsum("ncd,ndf->ncf", rows, weight[experts])


@helpers.jit
def with_gradients(rows, weight, experts, slope):
    """Results and gradients of the grouped and the naive product."""

    def one(f):
        out, pull = jax.vjp(lambda r, w: f(r, w, experts), rows, weight)
        return out, *pull(slope)

    return one(grouped_matmul), one(naive)


@pytest.mark.parametrize(
    ("blocks", "size", "experts"), [([0], 1, 1), ([0, 0, 2, 5], 3, 9), ([8, 8, 8], 8, 9), ([2, 0, 1, 0], 4, 3)]
)
def test_equals_the_naive_product_forward_and_backward(blocks, size, experts):
    rows, weight = helpers.normal(0, len(blocks), size, 5), helpers.normal(1, experts, 5, 3)
    slope, chosen = helpers.normal(2, len(blocks), size, 3), jnp.asarray(np.array(blocks, np.int32))
    actual, expected = helpers.host(with_gradients(rows, weight, chosen, slope))
    # Expert by expert, so that a wrong one cannot hide behind one with larger gradients.
    by_expert, expected_by_expert = ((*parts[:2], list(parts[2])) for parts in (actual, expected))
    helpers.assert_close(by_expert, expected_by_expert, helpers.FLOAT32)
    idle = sorted(set(range(experts)) - set(blocks))
    assert (actual[2][idle] == 0).all()
    assert (actual[2][blocks] != 0).all()


def test_an_experts_gradient_is_summed_in_float32_over_its_blocks():
    """Adding 1 to 256 in bfloat16 gives 256 again: 512 blocks would stop there."""
    rows, weight, slope = helpers.cast([np.ones((n, 1, 1)) for n in (512, 1, 512)], jnp.bfloat16)
    actual, _ = with_gradients(rows, weight, jnp.asarray(np.zeros(512, np.int32)), slope)
    assert {part.dtype.name for part in actual} == {"bfloat16"}
    assert float(actual[2][0, 0, 0]) == 512


def test_no_weight_is_copied():
    """No intermediate of the forward pass is as large as the weights of the blocks together."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 8, 32), (4, 32, 32))]
    chosen = jax.ShapeDtypeStruct((64,), jnp.int32)
    sizes = {
        f: max(aval.size for aval in helpers.avals(jax.make_jaxpr(f)(*shapes, chosen))) for f in (grouped_matmul, naive)
    }
    assert sizes[grouped_matmul] == 64 * 8 * 32
    assert sizes[naive] == 64 * 32 * 32
