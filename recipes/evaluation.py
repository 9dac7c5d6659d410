"""Loss and perplexity of a model on a text."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int, Int32

from recipes.placement.segments import outside_at_hand
from recipes.step.loss import Batch, Loss, next_token_loss


class Evaluation(NamedTuple):
    """Mean negative log-likelihood in nats a token, over how many tokens."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def __str__(self) -> str:
        return f"loss {self.loss:.4f} nats a token, perplexity {self.perplexity:.3f}, {self.num_tokens:,} tokens"


def evaluate(
    model: Any,
    tokens: Int[np.ndarray, " tokens"],
    *,
    sequence_length: int,
    batch_size: int = 1,
    batches: int = 0,
    counted: Bool[np.ndarray, " tokens"] | None = None,
) -> Evaluation:
    """The loss of every token but the first, each given those before it in its window of `sequence_length` tokens.

    Windows follow one another, each beginning on the last token of the one before; the last may be shorter. `batches`
    above 0 stops after so many. Of the tokens those are `counted` for which that is true, by default all. Raises
    ValueError for a text of less than two tokens, or none that counts.
    """
    if len(tokens) < 2:
        raise ValueError(f"Expected two tokens or more, got {len(tokens)}")
    counted = np.ones(len(tokens), bool) if counted is None else counted
    losses = jax.jit(evaluated)
    total, weight = 0.0, 0.0
    for number, batch in enumerate(_windows(tokens, counted, sequence_length, batch_size), start=1):
        metrics = losses(model, batch)
        total, weight = total + float(metrics.metrics["loss"]), weight + float(metrics.weight)
        if number == batches:
            break
    if not weight:
        raise ValueError("Expected a token that counts")
    return Evaluation(total / weight, round(weight))


def evaluated(model: Any, batch: Batch) -> Loss:
    """The loss of a batch, without that of multi-token prediction, wherever the model's arrays are."""
    return next_token_loss(outside_at_hand(model), batch, mtp=0.0)


def _windows(
    tokens: Int[np.ndarray, " tokens"], counted: Bool[np.ndarray, " tokens"], length: int, batch_size: int
) -> Iterator[dict[str, Int32[np.ndarray, "batch window"]]]:
    """Batches of equal shape: what the text does not fill is masked."""
    count = -(-(len(tokens) - 1) // length)
    for first in range(0, count, batch_size):
        places = length * np.arange(first, first + batch_size)[:, None] + np.arange(length + 1)
        inside, known = places < len(tokens), np.minimum(places, len(tokens) - 1)
        yield {
            "tokens": np.where(inside, tokens[known], 0).astype(np.int32),
            "loss_mask": (inside & counted[known]).astype(np.int32),
        }
