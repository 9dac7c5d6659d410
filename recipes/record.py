"""What a run leaves in `run.dir`."""

import json
import math
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

from recipes.listeners import Listener, Row
from zoo.checks import ConfigError

LOG = "metrics.jsonl"


class Record(Listener):
    """Writes `config.yaml` and `metrics.jsonl` into a folder that it makes; without a folder, nothing.

    A log that is there already is cut back to `step`, so that no step stands twice. `best` is the lowest validation
    loss of the run, before it was resumed too, and its step; None if none was taken. A context manager. Raises
    ConfigError if the folder or a file cannot be made.
    """

    best: tuple[float, float] | None = None

    def __init__(self, folder: str | None, resolved_config: str, step: int = 0):
        self._folder = None if folder is None else Path(folder)
        self._log: FileIO | None = None
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "config.yaml").write_text(resolved_config)
            self.best = _best(cut_back(self._folder / LOG, step))
            self._log = (self._folder / LOG).open("ab", buffering=0)
        except OSError as error:
            raise ConfigError("run.dir", folder, f"cannot be written: {error.strerror}", hint=error.filename) from error

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self.sync()
            self._log.close()
            print(f"written to {self._folder}")

    def sync(self) -> None:
        """Has the disk hold the log as it is: a checkpoint that outlives a loss of power must find its steps there."""
        if self._log is None or self._folder is None or self._log.closed:
            return
        os.fsync(self._log.fileno())
        folder = os.open(self._folder, os.O_RDONLY)
        with suppress(OSError):  # which not every file system does for a folder
            os.fsync(folder)
        os.close(folder)

    def step(self, row: Row) -> None:
        self._write(row)

    def validated(self, row: Row) -> None:
        self._write(row)
        loss, (best, step) = row["validation_loss"], self.best or (math.inf, 0)
        line = f"validation loss {loss:.4f} nats a token, perplexity {math.exp(min(loss, 700.0)):.3f}"
        print(f"{line}; best {best:.4f} at step {step}" if best < loss else line)
        self.best = min((best, step), (loss, row["step"]))

    def _write(self, row: Row) -> None:
        """One more line of `metrics.jsonl`."""
        if self._log is None or self._folder is None:
            return
        line = (json.dumps(row) + "\n").encode()
        try:
            while line:
                line = line[self._log.write(line) :]
        except OSError as error:  # which does not say where
            raise OSError(error.errno, error.strerror, str(self._folder / LOG)) from error


def _best(rows: list[Row]) -> tuple[float, float] | None:
    return min(((row["validation_loss"], row["step"]) for row in rows if "validation_loss" in row), default=None)


def cut_back(log: Path, step: int) -> list[Row]:
    """Takes out of a log what follows a step, or was torn as it was written; returns the rows that it keeps."""
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
    with partial.open("w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, log)
    return rows
