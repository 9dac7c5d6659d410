"""The loss on a fixed set of held-out batches."""

import jax

from recipes.data.batches import Batches
from recipes.evaluation import evaluated
from recipes.setup import Setup
from recipes.step.state import TrainState


class Validation:
    """The first `train.validation_batches` batches of the held-out text, the same every time."""

    def __init__(self, setup: Setup, batches: Batches):
        train = setup.config.train
        self._setup, self._batches, self._count = setup, batches, train.validation_batches
        if batches.num_sequences is not None:
            self._count = min(self._count, -(-batches.num_sequences // train.batch_size))
        self._loss = jax.jit(evaluated)

    def due(self, step: int) -> bool:
        """Whether to validate after this step: every `train.validate_every` steps, and after the last."""
        train = self._setup.config.train
        every = bool(train.validate_every) and step % train.validate_every == 0
        return self._count > 0 and (every or step == train.steps)

    def row(self, state: TrainState, step: int) -> dict[str, float]:
        """`step` and `validation_loss`, in nats a token."""
        size = self._setup.config.train.batch_size
        batches = (self._setup.batch(self._batches, number * size) for number in range(self._count))
        results = [self._loss(state.params, batch) for batch in batches]
        loss = float(sum(result.total for result in results) / sum(result.weight for result in results))
        return {"step": step, "validation_loss": loss}
