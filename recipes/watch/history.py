"""The figures of a run as its log has them. Free of jax."""

import json
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# What is kept of each step; a long run has millions of them.
COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "expert_load", "step_s", "tokens_per_s", "spike")


@dataclass(frozen=True)
class History:
    """A run, step by step: whatever starts it took.

    - `columns`: float64 by name, one value a step, NaN where there was none; those of `COLUMNS`.
    - `validation`: steps and validation losses, `[2, validations]`.
    - `device_peak_bytes`: the largest of all steps, None where devices do not say.
    """

    columns: dict[str, np.ndarray]
    validation: np.ndarray
    device_peak_bytes: int | None = None

    @classmethod
    def read(cls, log: str | Path) -> "History":
        """From a `metrics.jsonl`. A line that a dying run left unfinished is passed over."""
        with Path(log).open(encoding="utf-8") as lines:
            return cls.of(filter(None, map(_parsed, lines)))

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> "History":
        """From the objects of such a file."""
        columns = {name: array("d") for name in COLUMNS}
        validation, peak = (array("d"), array("d")), 0
        for row in rows:
            if "validation_loss" in row:
                validation[0].append(row["step"])
                validation[1].append(row["validation_loss"])
            if "loss" in row:
                for name, column in columns.items():
                    column.append(row.get(name, math.nan))
                peak = max(peak, row.get("device_peak_bytes", 0))
        found = {name: np.array(column) for name, column in columns.items()}
        return cls(found, np.array(validation).reshape(2, -1), peak or None)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def has(self, name: str) -> bool:
        """Whether any step has a value of that name."""
        return bool(np.isfinite(self.columns[name]).any())

    @property
    def bad(self) -> np.ndarray:
        """Which steps left the update out: those whose loss or gradient norm is not finite."""
        return ~(np.isfinite(self["loss"]) & np.isfinite(self["grad_norm"]))

    @property
    def spikes(self) -> np.ndarray:
        """Which steps had a spike of the gradient norm."""
        return np.isfinite(self["spike"])

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the lowest validation loss."""
        steps, losses = self.validation[:, np.isfinite(self.validation[1])]
        return (int(steps[losses.argmin()]), float(losses.min())) if losses.size else None


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
