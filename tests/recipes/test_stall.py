"""The watchdog under a clock of its own: when it speaks, when it keeps quiet, what it says."""

import threading
import time

import pytest

from recipes.watch.stall import Watchdog


class Clock:
    """Moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A run that the test moves on: `said` holds what the watchdog says. It looks at every second."""

    def __init__(self, factor: float | None = 10.0, floor_s: float = 5.0):
        self.clock, self.said, self._step = Clock(), [], 0
        self.dog = Watchdog(factor, floor_s=floor_s, say=self.said.append, clock=self.clock)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1
            self.dog.check()

    def step(self, seconds: int, ends: bool = True) -> None:
        self._step += 1
        self.dog.starts(self._step)
        self.wait(seconds)
        if ends:
            self.dog.step({"step": self._step})


def test_it_speaks_at_factor_times_the_median_and_again_as_the_time_doubles():
    run = Run()
    for seconds in (2, 2, 3, 2):
        run.step(seconds)
    run.step(19)
    assert run.said == []
    run.step(100)
    assert [line.split(",")[0] for line in run.said] == [f"step 6 has taken {seconds}.0 s" for seconds in (20, 40, 80)]
    assert "10 x the median of 2 s" in run.said[0]
    run.step(25)
    assert len(run.said) == 4  # the next stall is one of its own
    assert run.dog.stalls == [6, 7]


@pytest.mark.parametrize("factor", [10.0, None])
def test_what_lies_between_steps_is_no_stall(factor):
    """Compiling, validation, checkpoints."""
    run = Run(factor)
    run.wait(10_000)
    run.step(5000)  # no median yet
    for _ in range(20):
        run.step(2)
    run.wait(10_000)
    run.step(2)
    run.step(1, ends=False)
    run.dog.ends(0)
    run.wait(10_000)
    assert run.said == []
    run = Run(factor)
    for seconds in (1, 1, 1, 1000):
        run.step(seconds)
    assert bool(run.said) == (factor is not None)


def test_a_short_wait_is_no_stall_however_fast_the_steps():
    run = Run(floor_s=5)
    for _ in range(10):
        run.dog.starts(1)
        run.clock.now += 0.001
        run.dog.step({"step": 1})
    run.step(4)
    assert run.said == []
    run.step(5)
    assert len(run.said) == 1


def sleeps_here(until: threading.Event) -> None:
    until.wait(10)


def test_its_thread_says_where_the_run_waits_and_an_error_in_it_ends_nothing(monkeypatch):
    monkeypatch.setattr("recipes.watch.stall.POLL_S", 0.01)
    said, heard = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 1:
            raise ValueError("standard error is closed")
        heard.set()

    dog = Watchdog(2.0, floor_s=0.0, say=say)
    dog.begins(0)
    for step in range(1, 5):
        dog.starts(step)
        time.sleep(0.02)
        dog.step({"step": step})
    dog.starts(5)
    sleeps_here(heard)
    dog.ends(0)
    assert heard.is_set()
    innermost, caller, *_ = said[-1].partition("waits in ")[2].split(" < ")
    assert innermost.endswith(" wait")
    assert caller.startswith("recipes/test_stall.py:")
    assert caller.endswith(" sleeps_here")
