"""Stalls: a step that takes many times what steps take. Free of jax."""

import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

FLOOR_S = 5.0  # nobody minds less, and a busy machine takes as much now and then
POLL_S = 0.5
KNOWN_STEPS = 3  # no median before
REMEMBERED = 200
FRAMES = 3


class Watchdog:
    """Says on standard error when a step takes `factor` times the median, again after twice that time, and so on.

    A context manager, with a thread of its own that never touches the run. It looks only while a `step` is under way,
    so neither compiling, validation nor checkpoints count. A line says the step, how long it takes and where the thread
    that made the watchdog waits. `factor` None: no watching. `clock`, `say` and `floor_s`, below which nothing is a
    stall, are for tests.
    """

    def __init__(
        self,
        factor: float | None,
        *,
        floor_s: float = FLOOR_S,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._factor, self._floor_s, self._clock = factor, floor_s, clock
        self._say = say or _say
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._watched = threading.get_ident()
        self._under_way: tuple[int, float] | None = None  # step and its start: replaced whole, so never half new
        self._told: tuple[int, float] = (0, 0.0)  # the step last told of, and after how long
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._factor is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step. How long it took counts for the median."""
        start = self._clock()
        self._under_way = (number, start)
        try:
            yield
        finally:
            self._under_way = None
        self._times.append(self._clock() - start)

    def check(self) -> None:
        """Says so if the step under way stalls: what the thread does twice a second."""
        step, times = self._under_way, tuple(self._times)
        if step is None or self._factor is None or len(times) < KNOWN_STEPS:
            return
        number, start = step
        seconds, median = self._clock() - start, statistics.median(times)
        told = self._told[1] if self._told[0] == number else 0.0
        if seconds >= max(self._factor * median, self._floor_s, 2 * told):
            self._told = (number, seconds)
            self._say(
                f"step {number} has taken {seconds:,.1f} s, {seconds / median:,.0f} times the median of {median:.3g} s; "
                f"waiting in {_stack(self._watched)}"
            )

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            with suppress(Exception):  # a watchdog is no reason for a run to end
                self.check()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _stack(thread: int) -> str:
    """The innermost frames of a thread, `file:line function < its caller < ...`."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "a thread that has ended"
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES, lookup_lines=False)
    return " < ".join(f"{_short(each.filename)}:{each.lineno} {each.name}" for each in frames)


def _short(path: str) -> str:
    return os.sep.join(path.split(os.sep)[-2:])
