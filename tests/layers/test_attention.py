"""Grouped-query attention."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import Attention, Rope
from tests import helpers, reference

KEY = jax.random.key(0)
LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_length": 16}
# batch, sequence, heads, key-value heads, head size, rope, segments
CASES = {
    "one": (1, 1, 1, 1, 2, {}, False),
    "grouped": (2, 5, 4, 2, 6, {}, False),
    "multi_query": (1, 8, 3, 1, 4, {"theta": 100.0}, True),
    "llama3": (1, 13, 3, 3, 4, LLAMA3, False),
    "interleaved": (1, 5, 2, 2, 4, {"layout": "interleaved"}, True),
}
DIM = 6


def positions(length: int):
    return jnp.arange(length, dtype=jnp.int32)[None]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_oracle(case):
    batch, length, heads, kv_heads, head_dim, options, segmented = case
    layer = helpers.drawn(lambda: Attention(DIM, heads, kv_heads, head_dim, key=KEY), std=0.5)
    rope, x = Rope(dim=head_dim, **options), helpers.normal(9, batch, length, DIM)
    segments = np.random.default_rng(0).integers(0, 2, (batch, length)).astype(np.int32) if segmented else None
    run = helpers.jit(lambda layer, x, ids: layer(x, rope(positions(length)), ids))
    actual = run(layer, jnp.asarray(x), None if segments is None else jnp.asarray(segments))
    weights = {name: helpers.wide(getattr(layer, f"{name}_proj").weight) for name in ("query", "key", "value", "out")}
    ids = [None] * batch if segments is None else segments
    expected = [
        reference.attention(row, weights, heads, kv_heads, rope.frequencies(), rope.layout, ids[b])
        for b, row in enumerate(helpers.wide(x))
    ]
    helpers.assert_close(actual, np.stack(expected), helpers.FLOAT32)


def test_later_tokens_do_not_change_earlier_results():
    layer, rope = helpers.drawn(lambda: Attention(DIM, 2, 1, 4, key=KEY)), Rope(dim=4)
    run = eqx.filter_jit(lambda x: layer(x, rope(positions(7))))
    x = jnp.asarray(helpers.normal(9, 2, 7, DIM))
    before, after = helpers.host((run(x), run(x.at[:, 3].add(1.0))))
    helpers.assert_bit_equal(after[:, :3], before[:, :3])
    assert (after[:, 3:] != before[:, 3:]).any(axis=-1).all()


def test_another_attend_gets_the_scale_and_both_tags():
    given = {}

    def attend(query, key, value, segment_ids, *, scale, context, lse):
        given.update(scale=scale, names=(context.name, lse.name), shapes=(query.shape, key.shape, value.shape))
        return query + 1

    layer = helpers.drawn(lambda: Attention(DIM, 4, 2, 4, attend=attend, prefix="cross", key=KEY))
    jax.eval_shape(lambda x: layer(x, Rope(dim=4)(positions(5))), jnp.zeros((1, 5, DIM)))
    shapes = ((1, 5, 4, 4), (1, 5, 2, 4), (1, 5, 2, 4))
    assert given == {"scale": 0.5, "names": ("cross_context", "cross_lse"), "shapes": shapes}


def test_heads_must_be_divisible_by_key_value_heads():
    with pytest.raises(ValueError, match=r"num_heads=4 to be divisible by num_kv_heads=3"):
        Attention(DIM, 4, 3, 2, key=KEY)
