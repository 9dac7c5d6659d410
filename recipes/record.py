"""What a run leaves in `run.dir`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from zoo.checks import ConfigError


class Record:
    """Writes `config.yaml`, `metrics.jsonl` and `loss.png` into a folder that it makes; without a folder, nothing.

    A context manager. Raises ConfigError if the folder cannot be made.
    """

    def __init__(self, folder: str | None, resolved_config: str):
        self._folder = None if folder is None else Path(folder)
        self._log: TextIO | None = None
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("run.dir", folder, f"cannot be made: {error.strerror}") from error
        (self._folder / "config.yaml").write_text(resolved_config)
        self._log = (self._folder / "metrics.jsonl").open("w")

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
            print(f"written to {self._folder}")

    def row(self, row: Mapping[str, float]) -> None:
        """One more line of `metrics.jsonl`."""
        if self._log is not None:
            self._log.write(json.dumps(row) + "\n")
            self._log.flush()

    def plot(self, losses: Sequence[float], validation: tuple[int, float] | None, title: str) -> None:
        """Draws `loss.png`."""
        if self._folder is not None and losses:
            # Importing matplotlib takes a second, which the first step need not wait for.
            from recipes.plot import plot_loss

            plot_loss(losses, validation, title, self._folder / "loss.png")
