"""Multi-token prediction: the oracle, what each position may know, that the model itself stays as it is."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo
from layers import split_buffers
from recipes import next_token_loss
from tests import helpers, reference
from tests.zoo.test_decoder import ODD_DEEPSEEK, TOKENS, oracle_block
from zoo.base import Aux

DEPTHS = 2
SIZES: dict[str, Any] = {**ODD_DEEPSEEK, "num_layers": 1, "num_dense_layers": 1, "num_mtp_layers": DEPTHS}


@functools.cache
def model() -> Any:
    return helpers.drawn(lambda: zoo.build("debug_deepseek", key=jax.random.key(0), **SIZES), std=0.4)


@functools.cache
def forward() -> Any:
    return helpers.jit(lambda model, tokens: (model(tokens), model.forward(tokens)))


def norm(layer: Any, x: np.ndarray) -> np.ndarray:
    return reference.rms_norm(x, helpers.wide(layer.weight), 1e-3)


def test_hidden_states_equal_the_oracle():
    decoder = model()
    output = forward()(decoder, jnp.asarray(TOKENS))[1]
    embedding = helpers.wide(decoder.embedding.weight)
    for row, tokens in enumerate(TOKENS):
        x = oracle_block(decoder.layers.blocks[0], embedding[tokens], decoder.rope)
        hidden = norm(decoder.norm, x)
        helpers.assert_close(output.hidden[row], hidden, helpers.FLOAT32_MODEL)
        for depth, mtp in enumerate(decoder.mtp, start=1):
            ahead = embedding[np.roll(tokens, -depth)]
            both = np.concatenate([norm(mtp.embedding_norm, ahead), norm(mtp.hidden_norm, hidden)], axis=-1)
            x = oracle_block(mtp.layers.blocks[0], both @ helpers.wide(mtp.projection.weight), decoder.rope)
            hidden = norm(mtp.norm, x)
            helpers.assert_close(output.aux.mtp[depth - 1][row], hidden, helpers.FLOAT32_MODEL)


def test_a_position_of_depth_k_knows_k_tokens_more():
    before = forward()(model(), jnp.asarray(TOKENS))[1]
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    after = forward()(model(), jnp.asarray(changed))[1]
    for depth in range(DEPTHS + 1):
        old, new, first = (before.hidden, *before.aux.mtp)[depth], (after.hidden, *after.aux.mtp)[depth], 5 - depth
        helpers.assert_bit_equal(np.asarray(new)[:, :first], np.asarray(old)[:, :first])
        assert (np.asarray(new)[:, first] != np.asarray(old)[:, first]).any(axis=-1).all()


def test_the_model_itself_stays_as_it_is():
    """Its logits are those of the model without further depths; the counts of those come last."""
    without = eqx.tree_at(lambda model: model.mtp, model(), ())
    (logits, output), (expected, plain) = (forward()(each, jnp.asarray(TOKENS)) for each in (model(), without))
    helpers.assert_bit_equal(logits, expected)
    assert output.aux.moe.counts.shape == (DEPTHS, 9)
    assert plain.aux == Aux(None, ())


def test_every_parameter_of_every_depth_learns():
    batch = {"tokens": jnp.asarray(np.concatenate([TOKENS, TOKENS[:, :1]], axis=1))}
    trainable, buffers = split_buffers(model())

    @helpers.jit
    def gradient(trainable: Any) -> Any:
        return jax.grad(lambda t: next_token_loss(eqx.combine(t, buffers), batch, mtp=0.3).total)(trainable)

    for path, leaf in jax.tree.leaves_with_path(gradient(trainable).mtp):
        assert (np.asarray(leaf) != 0).any(), jax.tree_util.keystr(path)
