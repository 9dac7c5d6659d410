"""What a run leaves in `run.dir`."""

import json
import math
import os
from io import FileIO
from pathlib import Path
from typing import Any

from recipes.listeners import Listener, Row
from zoo.checks import ConfigError

LOG = "metrics.jsonl"


class Record(Listener):
    """Writes `config.yaml`, `metrics.jsonl` and `loss.png` into a folder that it makes; without a folder, nothing.

    A log that is there already is cut back to `step`, so that no step stands twice. A context manager. Raises
    ConfigError if the folder or a file cannot be made.
    """

    def __init__(self, folder: str | None, resolved_config: str, step: int = 0):
        self._folder = None if folder is None else Path(folder)
        self._log: FileIO | None = None
        self._rows: list[dict[str, Any]] = []
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "config.yaml").write_text(resolved_config)
            self._rows = cut_back(self._folder / LOG, step)
            self._log = (self._folder / LOG).open("ab", buffering=0)
        except OSError as error:
            raise ConfigError("run.dir", folder, f"cannot be written: {error.strerror}", hint=error.filename) from error

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
            print(f"written to {self._folder}")

    def step(self, row: Row) -> None:
        self._write(row)

    def validated(self, row: Row) -> None:
        self._write(row)
        loss, (best, step) = row["validation_loss"], self.best or (math.inf, 0)
        line = f"validation loss {loss:.4f} nats a token, perplexity {math.exp(min(loss, 700.0)):.3f}"
        print(f"{line}; best {best:.4f} at step {step}" if best < loss else line)

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest validation loss of the run, before it was resumed too, and its step; None if none was taken."""
        return min(
            ((row["validation_loss"], row["step"]) for row in self._rows if "validation_loss" in row), default=None
        )

    def _write(self, row: Row) -> None:
        """One more line of `metrics.jsonl`."""
        if self._log is None or self._folder is None:
            return
        self._rows.append(dict(row))
        line = (json.dumps(row) + "\n").encode()
        try:
            while line:
                line = line[self._log.write(line) :]
        except OSError as error:  # which does not say where
            raise OSError(error.errno, error.strerror, str(self._folder / LOG)) from error

    def plot(self, title: str) -> None:
        """Draws `loss.png`."""
        losses = [row["loss"] for row in self._rows if "loss" in row]
        validations = [(row["step"], row["validation_loss"]) for row in self._rows if "validation_loss" in row]
        if self._folder is not None and losses:
            # Importing matplotlib takes a second, which the first step need not wait for.
            from recipes.plot import plot_loss

            plot_loss(losses, validations[-1] if validations else None, title, self._folder / "loss.png")


def cut_back(log: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a log up to a step; what follows, or was torn as it was written, is taken out of the file."""
    if not log.exists():
        return []
    rows = []
    for line in log.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] <= step:
            rows.append(row)
    partial = log.with_name(f".{log.name}")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(partial, log)
    return rows
