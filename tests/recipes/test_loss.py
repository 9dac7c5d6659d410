"""The loss of a batch against a float64 formula, its gradient against automatic differentiation, and its memory."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from recipes import Loss, next_token_loss
from recipes.step.loss import cross_entropy
from tests import helpers
from tests.recipes.common import batch, model
from zoo.base import Aux, Output

BATCH, SEQ, DIM, VOCAB = 2, 7, 5, 11
HIDDEN, UNEMBEDDING = helpers.normal(0, BATCH, SEQ, DIM), helpers.normal(1, DIM, VOCAB)
TARGETS = np.random.default_rng(2).integers(0, VOCAB, (BATCH, SEQ), np.int32)
WEIGHTS = np.array([[1, 0, 1, 0.5, 1, 0, 2], [0, 0, 0, 1, 1, 1, 1]], np.float32)


def oracle(hidden: Any, unembedding: Any, targets: Any, weights: Any, z_loss: float) -> tuple[float, float]:
    """`(sum w (nll + z lse^2), sum w nll)` in float64."""
    logits = helpers.wide(hidden) @ helpers.wide(unembedding)
    lse: Any = logsumexp(logits, axis=-1)
    nll = lse - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return float(np.sum(weights * (nll + z_loss * lse**2))), float(np.sum(weights * nll))


def naive(hidden: Any, unembedding: Any, z_loss: float) -> Any:
    """The same by jax, all logits at once, for automatic differentiation."""
    logits = hidden @ unembedding
    lse = jax.nn.logsumexp(logits, axis=-1)
    scored = jnp.take_along_axis(logits, TARGETS[..., None], axis=-1)[..., 0]
    return jnp.sum(WEIGHTS * (lse - scored + z_loss * lse * lse))


@functools.cache
def naive_gradient(z_loss: float) -> Any:
    return jax.grad(naive, argnums=(0, 1))(HIDDEN, UNEMBEDDING, z_loss)


# A chunk may be one position, divide the sequence or not, or exceed it.
@pytest.mark.parametrize("chunk", [1, 3, 7, 128])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_cross_entropy_and_its_gradient(z_loss: float, chunk: int):
    def call(hidden: Any, unembedding: Any) -> Any:
        return cross_entropy(hidden, unembedding, TARGETS, WEIGHTS, z_loss, chunk)

    expected = oracle(HIDDEN, UNEMBEDDING, TARGETS, WEIGHTS, z_loss)
    helpers.assert_close(call(HIDDEN, UNEMBEDDING), expected, helpers.FLOAT32)
    (total, _), pull = jax.vjp(call, HIDDEN, UNEMBEDDING)
    helpers.assert_close(total, np.float64(expected[0]), helpers.FLOAT32)
    zero, one, three = (np.float32(x) for x in (0, 1, 3))
    gradient = pull((one, zero))
    helpers.assert_close(gradient, naive_gradient(z_loss), helpers.FLOAT32)
    helpers.assert_close(pull((three, zero)), jax.tree.map(lambda g: 3.0 * g, gradient), helpers.FLOAT32)
    helpers.assert_bit_equal(pull((zero, one)), jax.tree.map(jnp.zeros_like, gradient))


def test_large_logits_do_not_overflow():
    hidden, targets = np.full((1, 2, 1), 1e4, np.float32), np.array([[0, 1]], np.int32)
    unembedding = np.array([[1.0, -1.0]], np.float32)
    call = functools.partial(cross_entropy, targets=targets, weights=np.ones((1, 2), np.float32), z_loss=0.0, chunk=2)
    (total, _), pull = jax.vjp(call, hidden, unembedding)
    assert float(total) == 2e4  # the second target's logit is 2e4 below the first
    helpers.assert_finite(pull((np.float32(1), np.float32(0))))


def test_bfloat16_inputs_are_summed_in_float32():
    hidden, unembedding = (jnp.asarray(x, jnp.bfloat16) for x in (HIDDEN, UNEMBEDDING))
    (total, nll), pull = jax.vjp(lambda h, u: cross_entropy(h, u, TARGETS, WEIGHTS, 0.0, 3), hidden, unembedding)
    assert total.dtype == nll.dtype == jnp.float32
    expected = oracle(hidden, unembedding, TARGETS, WEIGHTS, 0.0)
    helpers.assert_close((total, nll), expected, helpers.FLOAT32)
    gradient = pull((np.float32(1), np.float32(0)))
    assert {leaf.dtype for leaf in gradient} == {jnp.dtype(jnp.bfloat16)}
    widened = jax.grad(naive, argnums=(0, 1))(hidden.astype(jnp.float32), unembedding.astype(jnp.float32), 0.0)
    helpers.assert_close(gradient, widened, helpers.BFLOAT16)


def test_no_array_holds_the_logits_of_all_positions():
    batch_size, seq, vocab, dim, chunk = 2, 300, 50, 4, 128

    def call(hidden: Any, unembedding: Any) -> Any:
        targets, weights = jnp.zeros((batch_size, seq), jnp.int32), jnp.ones((batch_size, seq))
        return cross_entropy(hidden, unembedding, targets, weights, 0.1, chunk)[0]

    shapes = jax.ShapeDtypeStruct((batch_size, seq, dim), jnp.float32), jax.ShapeDtypeStruct((dim, vocab), jnp.float32)
    for program in (jax.make_jaxpr(call)(*shapes), jax.make_jaxpr(jax.value_and_grad(call, (0, 1)))(*shapes)):
        largest = max(math.prod(aval.shape) for aval in helpers.avals(program.jaxpr))
        assert batch_size * chunk * vocab <= largest < batch_size * seq * vocab


class Echo:
    """A model whose hidden states are one-hot tokens: the logits of position t are row `tokens[t]` of a matrix.

    Those of its first depth of multi-token prediction are of the tokens reversed, those of the second as they are.
    """

    unembedding = UNEMBEDDING[:, :5]

    def __init__(self):
        self.seen: dict[str, Any] = {}

    def forward(self, tokens: Any, **context: Any) -> Any:
        self.seen = {"tokens": tokens, **context}
        hidden = jax.nn.one_hot(tokens, DIM)
        return Output(hidden, Aux(mtp=(hidden[:, ::-1], hidden)))


TOKENS: Any = np.array([[0, 1, 2, 3], [4, 4, 1, 0]], np.int32)


def nll(row: int, target: int) -> float:
    logits = Echo.unembedding[row].astype(np.float64)
    return float(logsumexp(logits) - logits[target])


def losses(**more: Any) -> tuple[Loss, Echo]:
    echo = Echo()
    return next_token_loss(echo, {"tokens": TOKENS, **more}, mtp=0.0), echo


def test_each_token_is_predicted_from_the_one_before():
    loss, echo = losses()
    pairs = [(0, 1), (1, 2), (2, 3), (4, 4), (4, 1), (1, 0)]
    assert float(loss.weight) == 6
    assert float(loss.total) == pytest.approx(sum(nll(*pair) for pair in pairs), rel=helpers.FLOAT32)
    assert float(loss.metrics["loss"]) == float(loss.total)
    assert loss.stats is None
    np.testing.assert_array_equal(echo.seen["tokens"], TOKENS[:, :-1])
    assert set(echo.seen) == {"tokens"}


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_the_mask_says_which_tokens_are_targets(dtype: Any):
    loss, _ = losses(loss_mask=np.array([[1, 0, 0, 1], [0, 1, 0, 1]]).astype(dtype))
    assert float(loss.weight) == 3
    assert float(loss.total) == pytest.approx(nll(2, 3) + nll(4, 4) + nll(1, 0), rel=helpers.FLOAT32)


def test_the_first_token_of_a_segment_is_no_target():
    segments = np.array([[0, 0, 1, 1], [5, 6, 6, 7]], np.int32)
    loss, echo = losses(segment_ids=segments, loss_mask=np.array([[1, 1, 1, 1], [1, 1, 1, 1]], bool))
    assert float(loss.weight) == 3
    assert float(loss.total) == pytest.approx(nll(0, 1) + nll(2, 3) + nll(4, 1), rel=helpers.FLOAT32)
    np.testing.assert_array_equal(echo.seen["segment_ids"], segments[:, :-1])


def test_positions_reach_the_model():
    positions = np.array([[0, 1, 0, 1], [3, 4, 5, 6]], np.int32)
    np.testing.assert_array_equal(losses(positions=positions)[1].seen["positions"], positions[:, :-1])


def test_the_balance_loss_enters_with_its_coefficient_and_the_weight_of_its_sequence():
    name = "deepseek_all_moe"
    call = jax.jit(lambda model, data: [next_token_loss(model, data, balance=a) for a in (0.0, 0.25)])
    without, with_balance = call(model(name), batch(name))
    mask, segments = batch(name)["loss_mask"], batch(name)["segment_ids"]
    weights = (mask[:, 1:] * (segments[:, 1:] == segments[:, :-1])).sum(1)
    assert weights[0] != weights[1]
    balances = float(np.sum(np.asarray(without.stats.balance_loss) * weights[None]))
    assert float(without.metrics["balance_loss"]) == pytest.approx(balances, rel=helpers.FLOAT32)
    added = float(with_balance.total - without.total)
    assert added == pytest.approx(0.25 * balances, rel=1e2 * helpers.FLOAT32)  # a difference of larger numbers
    assert float(with_balance.metrics["loss"]) == float(without.total)
    assert with_balance.stats.counts.sum(1).tolist() == [2 * 8 * 2] * 2  # tokens times experts a token


MTP_CASES = {
    "plain": ({}, np.ones((2, 4))),
    "mask": ({"loss_mask": np.array([[1, 1, 0, 1], [1, 1, 1, 0]], np.int32)}, np.array([[1, 1, 0, 1], [1, 1, 1, 0]])),
}


@pytest.mark.parametrize(("more", "mask"), MTP_CASES.values(), ids=MTP_CASES)
def test_further_tokens_are_predicted_from_the_same_position(more: dict[str, Any], mask: Any):
    """DeepSeek-V3, eq. 24-25: position i of depth k predicts token i + k + 1, where there is one."""
    reversed_inputs = [row[:3][::-1] for row in TOKENS]
    first = [mask[b, i + 2] * nll(reversed_inputs[b][i], TOKENS[b, i + 2]) for b in (0, 1) for i in (0, 1)]
    second = [mask[b, 3] * nll(TOKENS[b, 0], TOKENS[b, 3]) for b in (0, 1)]
    expected = (sum(first) + sum(second)) / 2
    call = [next_token_loss(Echo(), {"tokens": TOKENS, **more}, mtp=weight) for weight in (0.0, 0.5)]
    assert float(call[1].metrics["mtp_loss"]) == pytest.approx(expected, rel=helpers.FLOAT32)
    assert float(call[1].total - call[0].total) == pytest.approx(0.5 * expected, rel=1e2 * helpers.FLOAT32)
    assert float(call[1].metrics["loss"]) == float(call[0].total)
    assert float(call[0].weight) == float(call[1].weight) == mask[:, 1:].sum()
    assert "mtp_loss" not in call[0].metrics


def test_a_sequence_may_be_shorter_than_the_depths():
    found = next_token_loss(Echo(), {"tokens": TOKENS[:, :2]}, mtp=1.0)
    assert float(found.metrics["mtp_loss"]) == 0


def test_further_tokens_of_another_segment_are_no_targets():
    segments = np.array([[0, 0, 1, 1], [0, 0, 0, 0]], np.int32)
    batch: dict[str, Any] = {"tokens": TOKENS, "segment_ids": segments}
    found = next_token_loss(Echo(), batch, mtp=1.0)
    first = [nll(TOKENS[1, 2 - i], TOKENS[1, i + 2]) for i in (0, 1)]
    expected = (sum(first) + nll(TOKENS[1, 0], TOKENS[1, 3])) / 2
    assert float(found.metrics["mtp_loss"]) == pytest.approx(expected, rel=helpers.FLOAT32)
