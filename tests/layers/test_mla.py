"""Multi-head latent attention."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import MLA, Rope
from tests import helpers, reference
from tests.layers.test_attend import naive_attend

KEY = jax.random.key(0)
DIM = 6
YARN = {"scaling": "yarn", "factor": 40.0, "original_length": 8, "beta_fast": 2.0, "mscale_all_dim": 1.0}
# batch, sequence, heads, query rank, nope size, rope size, value size, rope, segments
CASES = {
    "one": (1, 1, 1, 3, 3, 2, 3, {}, False),
    "latent": (2, 5, 2, 4, 3, 4, 3, {}, False),
    "lite": (1, 5, 3, None, 3, 2, 5, {}, True),
    "yarn": (1, 8, 2, 4, 3, 4, 2, YARN, False),
    "yarn_amplitude": (1, 5, 2, None, 4, 4, 3, {**YARN, "mscale": 0.5}, True),
    "half": (1, 5, 2, 4, 3, 4, 3, {"layout": "half"}, False),
}


def layer_and_rope(case, **more):
    _, _, heads, rank, nope, rope_dim, value, rope_options, _ = case
    rope = Rope(dim=rope_dim, **{"layout": "interleaved", **rope_options})
    sizes = {"query_rank": rank, "kv_rank": 5, "nope_dim": nope, "rope_dim": rope_dim, "value_dim": value}
    options = {"softmax_factor": rope.softmax_factor, "eps": 1e-3, **more}
    layer = helpers.drawn(lambda: MLA(DIM, heads, **sizes, **options, key=KEY), std=0.6)
    return layer, rope


def apply(layer, rope, x, segments=None):
    return layer(x, rope(jnp.arange(x.shape[1], dtype=jnp.int32)[None]), segments)


def inputs(case):
    batch, length, *_, segmented = case
    segments = np.random.default_rng(0).integers(0, 2, (batch, length)).astype(np.int32)
    return jnp.asarray(helpers.normal(9, batch, length, DIM)), jnp.asarray(segments) if segmented else None


def weights_of(layer: MLA) -> dict[str, np.ndarray]:
    names = ("query_down", "query_norm", "query_up", "kv_down", "kv_norm", "kv_up", "out_proj")
    parts = {name.removesuffix("_proj"): getattr(layer, name) for name in names}
    return {name: helpers.wide(part.weight) for name, part in parts.items() if part is not None}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_oracle(case):
    layer, rope = layer_and_rope(case)
    x, segments = inputs(case)
    actual = helpers.jit(apply)(layer, rope, x, segments)
    expected = [
        reference.mla(
            row,
            weights_of(layer),
            layer.num_heads,
            layer.nope_dim,
            rope.frequencies(),
            layout=rope.layout,
            amplitude=rope.amplitude,
            softmax_factor=rope.softmax_factor,
            eps=1e-3,
            segments=None if segments is None else np.asarray(segments)[b],
        )
        for b, row in enumerate(helpers.wide(x))
    ]
    helpers.assert_close(actual, np.stack(expected), helpers.FLOAT32)


@pytest.mark.parametrize("name", ["yarn", "lite"])
def test_gradients_of_all_weights_equal_those_through_naive_attention(name):
    x, segments = inputs(CASES[name])
    both = [layer_and_rope(CASES[name], **more) for more in ({}, {"attend": naive_attend})]

    @helpers.jit
    def gradients(both):
        def loss(layer, rope):
            return jnp.sum(jnp.sin(apply(layer, rope, x, segments)))

        return [jax.tree.leaves(eqx.filter_grad(loss)(layer, rope)) for layer, rope in both]

    actual, expected = helpers.host(gradients(both))
    helpers.assert_close(actual, expected, helpers.FLOAT32)
    assert all((leaf != 0).any() for leaf in actual)


def test_yarn_scales_the_softmax_which_only_later_positions_show():
    scaled, rope = layer_and_rope(CASES["yarn"])
    plain, _ = layer_and_rope(CASES["yarn"], softmax_factor=1.0)
    assert scaled.scale == pytest.approx(7**-0.5 * (0.1 * np.log(40) + 1) ** 2, rel=helpers.FLOAT64)
    x, _ = inputs(CASES["yarn"])
    run = helpers.jit(apply)
    with_factor, without = helpers.host((run(scaled, rope, x), run(plain, rope, x)))
    helpers.assert_close(with_factor[:, 0], without[:, 0], helpers.FLOAT32)
    assert (np.max(abs(with_factor - without), axis=-1)[:, 1:] > 1e-3).all()


def test_all_heads_share_one_rotated_key_part():
    given = []

    def attend(query, key, value, segment_ids, *, scale, context, lse):
        given.append((query, key, value))
        return value

    layer, rope = layer_and_rope(CASES["latent"], attend=attend)
    x, _ = inputs(CASES["latent"])
    query, key, value = helpers.host(helpers.jit(lambda x: (apply(layer, rope, x), given.pop())[1])(x))
    assert (query.shape, key.shape, value.shape) == ((2, 5, 2, 7), (2, 5, 2, 7), (2, 5, 2, 3))
    assert (key[:, :, 0, 3:] == key[:, :, 1, 3:]).all()
    assert (key[:, :, 0, :3] != key[:, :, 1, :3]).all()
    assert (query[:, :, 0] != query[:, :, 1]).all()


def test_later_tokens_do_not_change_earlier_results():
    layer, rope = layer_and_rope(CASES["latent"])
    x, _ = inputs(CASES["latent"])
    run = eqx.filter_jit(apply)
    moved = np.asarray(x) + (np.arange(5) == 2).astype(np.float32)[None, :, None]
    before, after = helpers.host((run(layer, rope, x), run(layer, rope, jnp.asarray(moved))))
    helpers.assert_bit_equal(after[:, :2], before[:, :2])
    assert (after[:, 2:] != before[:, 2:]).any(axis=-1).all()
