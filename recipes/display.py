"""The progress of a run: a live line on a terminal, a line now and then elsewhere."""

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn

from recipes.listeners import Listener, Row

_LINES = 20


def display(steps: int) -> Listener:
    """A display for a run of `steps` steps, live if standard output is a terminal."""
    console = Console()
    return Live(steps, console) if console.is_terminal else Lines(steps)


class Live(Listener):
    """One line, redrawn."""

    def __init__(self, steps: int, console: Console):
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console)
        self._task = self._bar.add_task("", total=steps)

    def begins(self, step: int) -> None:
        self._bar.update(self._task, completed=step)
        self._bar.start()

    def step(self, row: Row) -> None:
        self._bar.update(self._task, completed=row["step"], description=_figures(row))

    def ends(self, code: int) -> None:
        self._bar.stop()


class Lines(Listener):
    """About twenty lines a run, and the first steps."""

    def __init__(self, steps: int):
        self._steps, self._every = steps, max(1, steps // _LINES)

    def begins(self, step: int) -> None:
        self._first, self._start = step, time.monotonic()

    def step(self, row: Row) -> None:
        step = row["step"]
        done = step - self._first
        if done == 1 or step == self._steps or step % self._every == 0:
            left = (time.monotonic() - self._start) / done * (self._steps - step)
            print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {_figures(row)}  {_duration(left)} left")
            sys.stdout.flush()


def _figures(row: Row) -> str:
    words = [f"loss {row['loss']:.3f}", f"grad {row['grad_norm']:.2f}"]
    if "expert_load" in row:
        words.append(f"load {row['expert_load']:.2f}")
    if row.get("dropped"):
        words.append(f"dropped {row['dropped']:.1%}")
    return "  ".join([*words, f"{row['tokens_per_s']:,.0f} tokens/s"])


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
