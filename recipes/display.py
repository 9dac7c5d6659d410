"""The progress of a run: a live line on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINES = 20


class Display(Protocol):
    """Told of each finished step."""

    def step(self, metrics: Mapping[str, float]) -> None: ...


@contextmanager
def progress(steps: int) -> Iterator[Display]:
    """A display for `steps` steps, live if standard output is a terminal."""
    console = Console()
    if not console.is_terminal:
        yield Lines(steps)
        return
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        yield Live(bar, bar.add_task("", total=steps))


class Live:
    """One line, redrawn."""

    def __init__(self, bar: Progress, task: TaskID):
        self._bar, self._task = bar, task

    def step(self, metrics: Mapping[str, float]) -> None:
        self._bar.update(self._task, advance=1, description=_figures(metrics))


class Lines:
    """About twenty lines a run, and the first steps."""

    def __init__(self, steps: int):
        self._steps, self._every = steps, max(1, steps // _LINES)
        self._start = time.monotonic()

    def step(self, metrics: Mapping[str, float]) -> None:
        done = int(metrics["step"])
        if done == 1 or done == self._steps or done % self._every == 0:
            left = (time.monotonic() - self._start) / done * (self._steps - done)
            print(f"step {done:>{len(str(self._steps))}}/{self._steps}  {_figures(metrics)}  {_duration(left)} left")
            sys.stdout.flush()


def _figures(metrics: Mapping[str, float]) -> str:
    words = [f"loss {metrics['loss']:.3f}", f"grad {metrics['grad_norm']:.2f}"]
    if "expert_load" in metrics:
        words.append(f"load {metrics['expert_load']:.2f}")
    if metrics.get("dropped"):
        words.append(f"dropped {metrics['dropped']:.1%}")
    return "  ".join([*words, f"{metrics['tokens_per_s']:,.0f} tokens/s"])


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
