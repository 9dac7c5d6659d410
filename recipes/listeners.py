"""Who is told of a run as it goes."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # an object of `metrics.jsonl`


class Listener:
    """Told what happens in a run, in the order in which it does. Each method does nothing unless overridden."""

    def begins(self, step: int) -> None:
        """The run begins, or goes on, after `step` steps."""

    def starts(self, step: int) -> None:
        """A step is about to start; `step` follows once its figures are there, or the run ends."""

    def step(self, row: Row) -> None:
        """A step is done: its `step`, `loss`, `grad_norm`, `cursor` (its first sequence), `step_s` and so on."""

    def validated(self, row: Row) -> None:
        """A loss over the validation set: `step` and `validation_loss`."""

    def saved(self, step: int, folder: str) -> None:
        """The saving of a checkpoint has begun; it is complete once `folder` is there, in a store its `config.yaml`."""

    def ends(self, code: int) -> None:
        """No more steps follow, whatever ended them: the exit code of the run."""


class Listeners(Listener):
    """Tells several, one after another."""

    def __init__(self, listeners: Sequence[Listener]):
        self._listeners = listeners

    def begins(self, step: int) -> None:
        for listener in self._listeners:
            listener.begins(step)

    def starts(self, step: int) -> None:
        for listener in self._listeners:
            listener.starts(step)

    def step(self, row: Row) -> None:
        for listener in self._listeners:
            listener.step(row)

    def validated(self, row: Row) -> None:
        for listener in self._listeners:
            listener.validated(row)

    def saved(self, step: int, folder: str) -> None:
        for listener in self._listeners:
            listener.saved(step, folder)

    def ends(self, code: int) -> None:
        for listener in self._listeners:
            listener.ends(code)
