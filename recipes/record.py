"""What a run leaves in `run.dir`."""

import json
import os
from pathlib import Path
from typing import TextIO

from recipes.listeners import Listener, Row
from zoo.checks import ConfigError

LOG = "metrics.jsonl"


class Record(Listener):
    """Writes `config.yaml` and `metrics.jsonl` into a folder that it makes; without a folder, nothing.

    A log that is there already is cut back to `step`, so that no step stands twice. A context manager. Raises
    ConfigError if the folder or a file cannot be made.
    """

    def __init__(self, folder: str | None, resolved_config: str, step: int = 0):
        self._folder = None if folder is None else Path(folder)
        self._log: TextIO | None = None
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "config.yaml").write_text(resolved_config)
            cut_back(self._folder / LOG, step)
            self._log = (self._folder / LOG).open("a")
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

    def _write(self, row: Row) -> None:
        """One more line of `metrics.jsonl`."""
        if self._log is not None:
            self._log.write(json.dumps(row) + "\n")
            self._log.flush()


def cut_back(log: Path, step: int) -> None:
    """Takes out of a log what follows a step, or was torn as it was written."""
    if not log.exists():
        return
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
