"""Blocks and stacks of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import Attention, DenseBlock, Experts, Linear, MoE, MoEBlock, Rope, Router, Stack, SwiGLU, build_stack
from tests import helpers

KEY = jax.random.key(0)
DIM, LENGTH = 4, 5


def attention() -> Attention:
    return Attention(DIM, 2, 1, 2, key=KEY)


def dense_block() -> DenseBlock:
    return DenseBlock(attention(), SwiGLU(DIM, 3, key=KEY), DIM, eps=0.1)


def moe_block() -> MoEBlock:
    moe = MoE(Router(DIM, 3, 2, key=KEY), Experts(DIM, 3, 3, key=KEY), None)
    return MoEBlock(attention(), moe, DIM, eps=0.1)


def arguments():
    x = jnp.asarray(helpers.normal(9, 2, LENGTH, DIM))
    return x, Rope(dim=2)(jnp.arange(LENGTH, dtype=jnp.int32)[None]), jnp.asarray([[0, 0, 1, 1, 1]] * 2, jnp.int32)


@pytest.mark.parametrize("make", [dense_block, moe_block])
def test_a_block_adds_attention_and_then_the_feed_forward_layer_of_normed_inputs(make):
    block = helpers.drawn(make)

    @helpers.jit
    def both(block, x, rotation, segments):
        actual, aux = block(x, rotation, segments)
        h = x + block.attention(block.attention_norm(x), rotation, segments)
        if isinstance(block, DenseBlock):
            return (actual, aux), (h + block.mlp(block.mlp_norm(h)), None)
        y, stats = block.moe(block.moe_norm(h))
        return (actual, aux), (h + y, stats)

    actual, expected = both(block, *arguments())
    helpers.assert_close(actual, expected, helpers.FLOAT32)
    first_norm, second_norm = (part for part in vars(block).values() if hasattr(part, "eps"))
    assert first_norm.eps == second_norm.eps == 0.1


def test_a_stack_applies_its_blocks_in_order_and_collects_reports_by_layer():
    blocks = [helpers.drawn(make, seed) for seed, make in enumerate((dense_block, moe_block, moe_block))]

    @helpers.jit
    def both(x, *args):
        expected, reports = x, []
        for block in blocks:
            expected, aux = block(expected, *args)
            reports.append(aux)
        return Stack(tuple(blocks))(x, *args), (expected, reports)

    (y, reports), (expected, expected_reports) = both(*arguments())
    helpers.assert_close(y, expected, helpers.FLOAT32)
    assert reports[0] is None
    for report, aux in zip(reports[1:], expected_reports[1:], strict=True):
        assert report.counts.shape == (1, 3)
        helpers.assert_close(jax.tree.map(lambda leaf: leaf[0], report), aux, helpers.FLOAT32)


@pytest.mark.parametrize("kinds", [["a"], ["a", "a", "a"], ["a", "b", "a", "a"], ["b", "a", "a"]])
def test_values_depend_on_the_layer_and_the_key_only(kinds):
    """Alone, in a run of equal kinds or after another kind: layer `i` is drawn from `fold_in(key, i)`."""
    stack = build_stack(lambda kind, key: Linear(2, 3 if kind == "a" else 4, key=key), kinds, key=KEY)
    assert len(stack.blocks) == len(kinds)
    for i, (kind, block) in enumerate(zip(kinds, stack.blocks, strict=True)):
        alone = Linear(2, 3 if kind == "a" else 4, key=jax.random.fold_in(KEY, i))
        helpers.assert_bit_equal(block, alone)
    drawn = [np.asarray(block.weight).ravel()[0] for block in stack.blocks]
    assert len(set(drawn)) == len(drawn)
