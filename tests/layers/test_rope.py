"""Rotary embedding: frequencies, layouts, scalings."""

import jax.numpy as jnp
import numpy as np
import pytest

from layers.rope import Rope
from tests import helpers, reference

LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_length": 512}
YARN = {"scaling": "yarn", "factor": 40.0, "original_length": 64, "beta_fast": 8.0, "mscale_all_dim": 1.0}
# name: rope, its frequencies by the oracle
ROPES = {
    "plain": (Rope(dim=6), reference.plain_frequencies(6, 1e4)),
    "plain_theta": (Rope(dim=8, theta=5e5), reference.plain_frequencies(8, 5e5)),
    "one_pair": (Rope(dim=2), reference.plain_frequencies(2, 1e4)),
    "llama3": (Rope(dim=24, **LLAMA3), reference.llama3_frequencies(24, 1e4, 8.0, 512)),
    "yarn": (Rope(dim=16, **YARN), reference.yarn_frequencies(16, 1e4, 40.0, 64, beta_fast=8.0)),
    "yarn_long": (
        Rope(dim=8, theta=100.0, scaling="yarn", factor=4.0, original_length=10**6, beta_fast=1e4),
        reference.yarn_frequencies(8, 100.0, 4.0, 10**6, beta_fast=1e4),
    ),
    "yarn_short": (
        Rope(dim=8, scaling="yarn", factor=4.0, original_length=64),
        reference.yarn_frequencies(8, 1e4, 4.0, 64),
    ),
    "yarn_tiny": (  # every pair turns less than beta_slow times over the original length
        Rope(dim=64, scaling="yarn", factor=4.0, original_length=2),
        reference.yarn_frequencies(64, 1e4, 4.0, 2),
    ),
    "yarn_v3": (
        Rope(dim=64, scaling="yarn", factor=40.0, original_length=4096),
        reference.yarn_frequencies(64, 1e4, 40.0, 4096),
    ),
}


def rotation(rope: Rope, positions):
    return rope(jnp.asarray(np.atleast_2d(positions).astype(np.int32)))


@pytest.mark.parametrize(("rope", "expected"), ROPES.values(), ids=ROPES)
def test_frequencies_equal_the_oracle(rope, expected):
    helpers.assert_close(rope.frequencies(), expected, helpers.FLOAT64)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("positions", "tolerance"), [([0, 1, 2, 9, 31], helpers.FLOAT32), ([4095, 5000], helpers.ROTATION_FAR)]
)
def test_rotation_equals_the_oracle(layout, positions, tolerance):
    x = helpers.normal(0, 2, len(positions), 3, 16)
    ropes = [Rope(dim=16, layout=layout, **scaling) for scaling in ({}, LLAMA3, YARN)]
    for rope, actual in zip(ropes, helpers.jit(lambda x: [rotation(r, positions)(x) for r in ropes])(x), strict=True):
        turned = [reference.rotate(row, np.array(positions), rope.frequencies(), layout) for row in helpers.wide(x)]
        helpers.assert_close(actual, rope.amplitude * np.stack(turned), tolerance)


def test_each_sequence_of_a_batch_has_its_own_positions():
    x, positions = helpers.normal(0, 1, 5, 2, 4), np.array([range(5), range(3, 8)], np.int32)
    run = helpers.jit(lambda x, positions: Rope(dim=4)(jnp.asarray(positions))(x))
    both = np.asarray(run(np.concatenate([x, x]), positions))
    for row in (0, 1):
        helpers.assert_bit_equal(both[row], np.asarray(run(x, positions[row : row + 1]))[0])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [{}, LLAMA3, YARN], ids=["plain", "llama3", "yarn"])
def test_scores_depend_on_differences_of_positions_only(layout, scaling):
    rope, (query, key) = Rope(dim=8, layout=layout, **scaling), helpers.normal(1, 2, 1, 1, 1, 8)

    @helpers.jit
    def scores(start):
        positions = start + jnp.arange(4, dtype=jnp.int32)[None]
        turned = rope(positions)(jnp.broadcast_to(query, (1, 4, 1, 8)))
        return jnp.einsum("bshd,bthd->bst", turned, rope(positions)(jnp.broadcast_to(key, (1, 4, 1, 8))))

    at_zero = scores(jnp.int32(0))
    helpers.assert_close(scores(jnp.int32(57)), at_zero, helpers.FLOAT32)
    assert np.ptp(at_zero[0, 0]) > 0.1
    for offset in range(1, 3):
        diagonal = np.diagonal(at_zero[0], offset)
        helpers.assert_close(diagonal, np.full_like(diagonal, diagonal[0]), helpers.FLOAT32)


def test_angles_depend_on_theta_and_nothing_is_shared_between_instances():
    x = helpers.normal(0, 1, 4, 1, 8)
    run = helpers.jit(lambda x: [rotation(Rope(dim=8, theta=theta), range(4))(x) for theta in (1e4, 5e5, 1e4)])
    first, other, again = helpers.host(run(x))
    helpers.assert_bit_equal(first, again)
    helpers.assert_bit_equal(first[:, 0], x[:, 0])
    assert (first[:, 1:] != other[:, 1:]).any(axis=-1).all()


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    """Llama 3.1: waves below 2048 positions stay, waves above 8192 are 8 times as long, the rest lie between."""
    rope = Rope(dim=128, theta=5e5, scaling="llama3", factor=8.0, original_length=8192)
    plain = reference.plain_frequencies(128, 5e5)
    ratio, wave = rope.frequencies() / plain, 2 * np.pi / plain
    helpers.assert_close(ratio[wave < 2048], np.ones(np.sum(wave < 2048)), helpers.FLOAT64)
    helpers.assert_close(ratio[wave > 8192], np.full(np.sum(wave > 8192), 1 / 8), helpers.FLOAT64)
    between = ratio[(wave > 2048) & (wave < 8192)]
    assert len(between) > 3
    assert (np.diff(between) < 0).all()


def test_yarn_of_deepseek_keeps_ten_pairs_and_interpolates_from_pair_23():
    ratio = ROPES["yarn_v3"][0].frequencies() / reference.plain_frequencies(64, 1e4)
    helpers.assert_close(ratio[:11], np.ones(11), helpers.FLOAT64)
    helpers.assert_close(ratio[23:], np.full(9, 1 / 40), helpers.FLOAT64)
    assert (np.diff(ratio[10:24]) < 0).all()


M = 0.1 * np.log(40) + 1  # 1.3688879...


@pytest.mark.parametrize(
    ("options", "amplitude", "softmax_factor"),
    [
        ({"scaling": "none", "mscale_all_dim": 1.0}, 1.0, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, M, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, M**2),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * np.log(40) + 1) / M, M**2),
        ({"factor": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
    ],
)
def test_yarn_scales_rotations_and_softmax(options, amplitude, softmax_factor):
    rope = Rope(dim=4, **{"scaling": "yarn", "factor": 40.0, "original_length": 4096, **options})
    assert rope.amplitude == pytest.approx(amplitude, rel=helpers.FLOAT64)
    assert rope.softmax_factor == pytest.approx(softmax_factor, rel=helpers.FLOAT64)
    x = helpers.normal(0, 1, 1, 1, 4)
    actual = helpers.jit(lambda x: rotation(rope, [0])(x))(x)
    helpers.assert_close(actual, amplitude * helpers.wide(x), helpers.FLOAT32)


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    x = helpers.cast(helpers.normal(0, 1, 32, 2, 8), jnp.bfloat16)
    turn = helpers.jit(lambda x: rotation(Rope(dim=8), range(32))(x))
    helpers.assert_bit_equal(turn(x), helpers.cast(turn(helpers.cast(x, np.float32)), jnp.bfloat16))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dim": 3}, "must be even.*dim=3"), ({"dim": 4, "scaling": "yarn"}, "yarn rope scaling needs original_length")],
)
def test_impossible_ropes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Rope(**options)
