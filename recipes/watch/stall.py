"""Stalls: a step that takes many times what steps take. Free of jax."""

import os
import statistics
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from recipes.listeners import Listener, Row

FLOOR_S = 5.0  # nobody minds less, and a busy machine takes as much now and then
POLL_S = 0.5
KNOWN_STEPS = 3  # no median before
REMEMBERED = 200
CALLERS = 3
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class Watchdog(Listener):
    """Says on standard error when a step takes `factor` times the median, again after twice that time, and so on.

    It looks only while a step is under way, from `starts` to `step`, so neither compiling, validation nor checkpoints
    count, from a thread of its own that never touches the run. A line says the step, how long it takes and where the
    thread that began the run waits. `factor` None: no watching. `clock`, `say` and `floor_s`, below which nothing is a
    stall, are for tests. `stalls` are the steps that it told of.
    """

    def __init__(
        self,
        factor: float | None,
        *,
        floor_s: float = FLOOR_S,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stalls: list[int] = []
        self._factor, self._floor_s, self._clock = factor, floor_s, clock
        self._say = say or _say
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._watched = threading.get_ident()
        self._under_way: tuple[int, float] | None = None  # step and its start: replaced whole, so never half new
        self._told_s = 0.0  # how long the step last told of had taken then
        self._stop = threading.Event()

    def begins(self, step: int) -> None:
        self._watched = threading.get_ident()
        if self._factor is not None:
            threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    def starts(self, step: int) -> None:
        self._under_way = (step, self._clock())

    def step(self, row: Row) -> None:
        if self._under_way is not None:
            self._times.append(self._clock() - self._under_way[1])
        self._under_way = None

    def ends(self, code: int) -> None:
        self._under_way = None
        self._stop.set()

    def check(self) -> None:
        """Says so if the step under way stalls: what the thread does twice a second."""
        step, times = self._under_way, tuple(self._times)
        if step is None or self._factor is None or len(times) < KNOWN_STEPS:
            return
        number, start = step
        seconds, median = self._clock() - start, max(statistics.median(times), 1e-6)
        again = number in self.stalls
        if seconds >= max(self._factor * median, self._floor_s, 2 * self._told_s if again else 0.0):
            self._told_s = seconds
            if not again:
                self.stalls.append(number)
            self._say(
                f"step {number} has taken {seconds:,.1f} s, {seconds / median:,.0f} x the median of {median:.3g} s, "
                f"and waits in {_stack(self._watched)}"
            )

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            with suppress(Exception):  # a watchdog is no reason for a run to end
                self.check()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _stack(thread: int) -> str:
    """Where a thread is, `file:line function`, then the innermost of its callers that belong to no library."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "a thread that has ended"
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    callers = [each for each in frames[1:] if not each.filename.startswith(_LIBRARIES)]
    shown = [frames[0], *(callers or frames[1:])[:CALLERS]]
    return " < ".join(f"{_short(each.filename)}:{each.lineno} {each.name}" for each in shown)


def _short(path: str) -> str:
    return os.sep.join(path.split(os.sep)[-2:])
