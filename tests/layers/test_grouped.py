"""SwiGLU of blocks of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from layers import Tag
from layers.grouped import Names, Weights, grouped_swiglu
from tests import helpers

NAMES = Names(Tag("gate", Float[Array, "n c f"]), Tag("up", Float[Array, "n c f"]))


def ours(rows, scales, weights, experts):
    return grouped_swiglu(rows, scales, weights, experts, NAMES)


def naive(rows, scales, weights, experts):
    gate, up, down = (weight[experts] for weight in weights)
    hidden = jax.nn.silu(jnp.einsum("ncd,ndf->ncf", rows, gate)) * jnp.einsum("ncd,ndf->ncf", rows, up)
    return scales[..., None] * jnp.einsum("ncf,nfd->ncd", hidden, down)


@helpers.jit
def with_gradients(rows, scales, weights, experts, slope):
    """Results and gradients of the grouped and the naive form."""

    def one(f):
        out, pull = jax.vjp(lambda *args: f(*args, experts), rows, scales, weights)
        return out, *pull(slope)

    return one(ours), one(naive)


def drawn(blocks: int, size: int, experts: int, dim: int = 5, hidden: int = 3):
    """Rows, scales and weights."""
    shapes = ((experts, dim, hidden), (experts, dim, hidden), (experts, hidden, dim))
    weights = Weights(*(jnp.asarray(helpers.normal(seed, *shape)) for seed, shape in enumerate(shapes)))
    return helpers.normal(7, blocks, size, dim), helpers.normal(8, blocks, size), weights


@pytest.mark.parametrize(
    ("blocks", "size", "experts"), [([0], 1, 1), ([0, 0, 2, 5], 3, 9), ([8, 8, 8], 8, 9), ([2, 0, 1], 4, 3)]
)
def test_equals_the_naive_form_forward_and_backward(blocks, size, experts):
    args, slope = drawn(len(blocks), size, experts), helpers.normal(9, len(blocks), size, 5)
    actual, expected = helpers.host(with_gradients(*args, jnp.asarray(np.array(blocks, np.int32)), slope))
    # Expert by expert, so that a wrong one cannot hide behind one with larger gradients.
    by_expert, expected_by_expert = ((*parts[:3], [list(leaf) for leaf in parts[3]]) for parts in (actual, expected))
    helpers.assert_close(by_expert, expected_by_expert, helpers.FLOAT32)
    idle = sorted(set(range(experts)) - set(blocks))
    for leaf in actual[3]:
        assert (leaf[idle] == 0).all()
        assert (leaf[blocks] != 0).all()


def test_an_experts_gradient_is_summed_in_float32_over_its_blocks():
    """Adding 1 to 256 in bfloat16 gives 256 again: 512 blocks would stop there."""
    rows, scales, slope = helpers.cast([np.ones(shape) for shape in ((512, 1, 1), (512, 1), (512, 1, 1))], jnp.bfloat16)
    weights = Weights(*helpers.cast([np.full((1, 1, 1), value) for value in (64.0, 1 / 64, 1.0)], jnp.bfloat16))
    actual, _ = with_gradients(rows, scales, weights, jnp.asarray(np.zeros(512, np.int32)), slope)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(actual)} == {"bfloat16"}
    assert float(actual[3].down[0, 0, 0]) == 512  # 64 * sigmoid(64) / 64 = 1 a block


def test_no_weight_is_copied():
    """No intermediate of the gradient is as large as the weights of the blocks together."""
    experts = jax.ShapeDtypeStruct((64,), jnp.int32)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), drawn(64, 8, 4, 32, 32))

    def largest(f):
        def gradient(rows, scales, weights, experts):
            return jax.grad(lambda *args: jnp.sum(f(*args, experts)), (0, 1, 2))(rows, scales, weights)

        return max(aval.size for aval in helpers.avals(jax.make_jaxpr(gradient)(*args, experts)))

    assert largest(ours) == 64 * 8 * 32
    assert largest(naive) == 64 * 32 * 32
