"""The whole decoder: the oracle, causality, packed segments, router statistics."""

import functools
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from layers import MoEBlock, Rope
from tests import helpers, reference
from tests.zoo.test_models import TINY

ODD_DEEPSEEK = {
    **TINY["debug_deepseek"],
    "num_layers": 3,
    "vocab_size": 11,
    "query_rank": None,
    "kv_rank": 3,
    "nope_head_dim": 3,
    "rope_head_dim": 2,
    "value_head_dim": 3,
    "num_experts": 9,
    "num_shared_experts": 2,
    "norm_eps": 1e-3,
    "router": {"groups": 3, "groups_kept": 2, "scale": 2.5},
    "rope": {
        "layout": "interleaved",
        "scaling": "yarn",
        "factor": 40,
        "original_length": 8,
        "beta_fast": 2.0,
        "mscale_all_dim": 1.0,
    },
}
ODD_LLAMA = {
    **TINY["debug_llama"],
    "vocab_size": 11,
    "num_layers": 1,
    "norm_eps": 1e-3,
    "rope": {"theta": 50.0, "scaling": "llama3", "factor": 8, "original_length": 16},
}
MODELS = {"debug_llama": ODD_LLAMA, "debug_deepseek": ODD_DEEPSEEK}
TOKENS = np.array([[1, 5, 2, 5, 9, 0, 3], [4, 4, 4, 7, 8, 10, 6]], np.int32)


@functools.cache
def model(name: str):
    return helpers.drawn(lambda: zoo.abstract(name, **MODELS[name]), std=0.5)


@functools.cache
def forward():
    """Logits and statistics, compiled as a model is in training."""
    return eqx.filter_jit(lambda model, *args: (model(*args), model.forward(*args)))


def weights(module, *names: str) -> dict[str, np.ndarray]:
    """Weights of the projections and norms of a module that has them all as `<name>_proj`, or as `<name>`."""
    parts = {name: getattr(module, f"{name}_proj" if hasattr(module, f"{name}_proj") else name) for name in names}
    return {name: helpers.wide(getattr(part, "weight", part)) for name, part in parts.items()}


def oracle_block(block: Any, x: np.ndarray, rope: Rope) -> np.ndarray:
    def norm(layer, x):
        return reference.rms_norm(x, helpers.wide(layer.weight), 1e-3)

    attention, frequencies = block.attention, rope.frequencies()
    if hasattr(attention, "kv_down"):
        parts = weights(attention, "query_up", "kv_down", "kv_norm", "kv_up", "out")
        options = {"layout": "interleaved", "softmax_factor": (0.1 * np.log(40) + 1) ** 2}  # latents: 1e-6
        x = x + reference.mla(norm(block.attention_norm, x), parts, 2, 3, frequencies, **options)
    else:
        parts = weights(attention, "query", "key", "value", "out")
        x = x + reference.attention(norm(block.attention_norm, x), parts, 2, 1, frequencies)
    if not isinstance(block, MoEBlock):
        return x + reference.swiglu(norm(block.mlp_norm, x), **weights(block.mlp, "gate", "up", "down"))
    y, moe = norm(block.moe_norm, x), cast(Any, block.moe)
    affinity = reference.affinities(y @ helpers.wide(moe.router.weight), "sigmoid")
    bias = helpers.wide(moe.router.bias.value)
    chosen_weights, chosen = reference.route(affinity, 2, bias, groups=3, groups_kept=2, scale=2.5)
    routed = reference.experts(y, weights(moe.experts, "gate", "up", "down"), chosen_weights, chosen)
    return x + routed + reference.swiglu(y, **weights(moe.shared, "gate", "up", "down"))


def oracle_frequencies(name: str) -> np.ndarray:
    if name == "debug_llama":
        return reference.llama3_frequencies(4, 50.0, 8.0, 16)
    return reference.yarn_frequencies(2, 1e4, 40.0, 8, beta_fast=2.0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_oracle(name):
    decoder = model(name)
    helpers.assert_close(decoder.rope.frequencies(), oracle_frequencies(name), helpers.FLOAT64)
    logits, output = forward()(decoder, jnp.asarray(TOKENS))
    expected = []
    for row in TOKENS:
        x = helpers.wide(decoder.embedding.weight)[row]
        for block in decoder.layers.blocks:
            x = oracle_block(block, x, decoder.rope)
        hidden = reference.rms_norm(x, helpers.wide(decoder.norm.weight), 1e-3)
        expected.append(hidden @ helpers.wide(decoder.head.weight))
    helpers.assert_close(logits, np.stack(expected), helpers.FLOAT32_MODEL)
    assert output.hidden.shape == (*TOKENS.shape, 8)


@pytest.mark.parametrize("name", MODELS)
def test_later_tokens_do_not_change_earlier_logits(name):
    before = np.asarray(forward()(model(name), jnp.asarray(TOKENS))[0])
    for position in (1, 6):
        changed = TOKENS.copy()
        changed[:, position] = (changed[:, position] + 1) % 11
        after = np.asarray(forward()(model(name), jnp.asarray(changed))[0])
        helpers.assert_bit_equal(after[:, :position], before[:, :position])
        assert (after[:, position] != before[:, position]).any(axis=-1).all()


@pytest.mark.parametrize("name", MODELS)
def test_packed_segments_equal_separate_runs(name):
    """Two texts in one row, each with its own positions, are as far apart as two rows."""
    segments = np.array([[0] * 3 + [1] * 4] * 2, np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3]] * 2, np.int32)
    packed = np.asarray(forward()(model(name), *map(jnp.asarray, (TOKENS, positions, segments)))[0])
    whole = np.asarray(forward()(model(name), jnp.asarray(TOKENS))[0])
    # The second text alone, filled up behind, which causality keeps out.
    rolled = jnp.asarray(np.roll(TOKENS, -3, axis=1))
    alone = np.asarray(forward()(model(name), rolled)[0])
    helpers.assert_close(packed[:, :3], whole[:, :3], helpers.FLOAT32_MODEL)
    helpers.assert_close(packed[:, 3:], alone[:, :4], helpers.FLOAT32_MODEL)
    assert np.abs(packed[:, 3:] - whole[:, 3:]).max() > 0.01 * np.abs(whole).max()


def test_statistics_are_one_row_a_moe_layer():
    _, output = forward()(model("debug_deepseek"), jnp.asarray(TOKENS))
    assert output.aux.moe.counts.shape == (2, 9)
    assert np.sum(output.aux.moe.counts, axis=1).tolist() == [TOKENS.size * 2] * 2
    assert output.aux.moe.balance_loss.shape[0] == 2
    _, output = forward()(model("debug_llama"), jnp.asarray(TOKENS))
    assert output.aux.moe is None


def test_a_capacity_drops_choices_of_moe_layers_and_says_how_many():
    limited = zoo.abstract("debug_deepseek", **ODD_DEEPSEEK, capacity_factor=0.25)
    decoder = jax.tree.unflatten(jax.tree.structure(limited), jax.tree.leaves(model("debug_deepseek")))
    (logits, output), (whole, plain) = (
        forward()(each, jnp.asarray(TOKENS)) for each in (decoder, model("debug_deepseek"))
    )
    counts = np.asarray(output.aux.moe.counts)
    capacity = -(-TOKENS.size * 2 // (4 * 9))  # a quarter of the mean load of 9 experts, rounded up
    np.testing.assert_array_equal(output.aux.moe.dropped, np.maximum(counts - capacity, 0).sum(1))
    assert (np.asarray(output.aux.moe.dropped) > 0).all()
    assert (np.asarray(plain.aux.moe.dropped) == 0).all()
    assert np.abs(np.asarray(logits) - np.asarray(whole)).max() > 1e-2


def test_balance_loss_reaches_every_router_and_no_bias():
    decoder = model("debug_deepseek")
    loss = lambda model: jnp.sum(model.forward(jnp.asarray(TOKENS)).aux.moe.balance_loss)  # noqa: E731
    gradient = helpers.jit(eqx.filter_grad(loss))(decoder)
    routers: list[Any] = [block.moe.router for block in gradient.layers.blocks if isinstance(block, MoEBlock)]
    assert len(routers) == 2
    assert all((np.asarray(router.weight) != 0).all() for router in routers)
    assert all((np.asarray(router.bias.value) == 0).all() for router in routers)


def test_one_token_one_sequence():
    logits, _ = forward()(model("debug_llama"), jnp.asarray([[1]], jnp.int32))
    assert logits.shape == (1, 1, 11)
    helpers.assert_finite(logits)
