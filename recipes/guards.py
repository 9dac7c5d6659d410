"""What a run looks out for in its own figures."""

import math
import statistics
from collections import deque

from recipes.config import TrainConfig
from recipes.listeners import Row

_WINDOW = 64  # steps that the running median of gradient norms is taken over
_ENOUGH = 16  # steps before a norm can be called a spike


class Guards:
    """Finds bad steps, of which loss or gradient norm are not finite, and spikes of the norm."""

    def __init__(self, config: TrainConfig):
        self._config = config
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._bad_in_a_row = 0

    def look(self, row: Row) -> Row:
        """The row of a step, with `spike` if its gradient norm is one; prints a line about what is unusual."""
        step, norm, first = row["step"], row["grad_norm"], row["cursor"]
        where = f"sequences {first} to {first + self._config.batch_size - 1} of the run"
        if not (math.isfinite(row["loss"]) and math.isfinite(norm)):
            self._bad_in_a_row += 1
            print(f"step {step}: loss {row['loss']}, gradient norm {norm}: no update; {where}")
            return row
        self._bad_in_a_row = 0
        usual = statistics.median(self._norms) if len(self._norms) >= _ENOUGH else math.inf
        self._norms.append(norm)
        if norm <= self._config.spike_factor * usual:
            return row
        print(f"step {step}: gradient norm {norm:.3g}, {norm / usual:.1f} times the median; {where}")
        return {**row, "spike": norm / usual}

    def verdict(self, row: Row) -> str | None:
        """Why the run must end after this step, with advice; None if it goes on."""
        if self._bad_in_a_row < self._config.max_bad_steps:
            return None
        rate = row.get("learning_rate", math.nan)
        return (
            f"loss {row['loss']} at step {row['step']}, bad steps in a row: {self._bad_in_a_row}; "
            f"learning rate {rate:.2e}, gradient norm {row['grad_norm']:.3g}\n"
            "try a lower optimizer.learning_rate, a longer optimizer.warmup_fraction, a smaller optimizer.clip_norm, "
            "or train.dtype=float32"
        )
