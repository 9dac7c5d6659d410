"""Continuations: the likeliest token, or one drawn at a temperature."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes import generate
from tests import helpers
from tests.recipes.common import abstract

NAME = "llama_tied"
PROMPT = jnp.asarray([1, 2, 3], jnp.int32)


def model() -> Any:
    return helpers.drawn(lambda: abstract(NAME), std=1.0)


def test_greedy_text_is_what_the_logits_say():
    text = np.asarray(jax.jit(lambda model: generate(model, PROMPT, 5))(model()))
    assert text[:3].tolist() == PROMPT.tolist()
    logits = np.asarray(helpers.jit(lambda model, x: model(x))(model(), jnp.asarray(text[None, :-1])))[0]
    assert text[3:].tolist() == np.argmax(logits, axis=-1)[2:].tolist()


def test_a_temperature_draws_with_the_probabilities_of_the_logits():
    logits = np.asarray(model()(PROMPT[None]), np.float64)[0, -1] / 2.0
    expected = np.exp(logits - logits.max()) / np.sum(np.exp(logits - logits.max()))
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(jax.vmap(lambda key: generate(model(), PROMPT, 1, temperature=2.0, key=key)[-1]))
    counts = np.bincount(np.asarray(draw(keys)), minlength=len(expected)) / len(keys)
    assert np.abs(counts - expected).max() < 0.03  # four deviations of a share of 4000 draws


def test_a_low_temperature_is_greedy_and_keys_decide():
    greedy = generate(model(), PROMPT, 4)
    cold = generate(model(), PROMPT, 4, temperature=1e-4, key=jax.random.key(1))
    assert greedy.tolist() == cold.tolist()
    warm = [generate(model(), PROMPT, 6, temperature=5.0, key=jax.random.key(k)).tolist() for k in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]


@pytest.mark.parametrize("temperature", [-1.0, 0.5])
def test_a_temperature_needs_a_key_and_is_not_negative(temperature):
    with pytest.raises(ValueError, match="Expected temperature"):
        generate(model(), PROMPT, 1, temperature=temperature)
