"""Ctrl-C and SIGTERM ask a run to stop after the step at hand."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax


class Stop:
    """Which signal asked, None if none did."""

    signal: int | None = None

    @property
    def code(self) -> int:
        """The exit code of a run that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def asked(self, step: int) -> bool:
        """Whether to stop after this step; of several processes all learn it after the same one."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self.signal = signal.SIGTERM
        return self.signal is not None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Takes note of a signal; a second one interrupts at once."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Signals that ask to stop are noted within. Call it in the main thread.

    Of several processes JAX itself listens for SIGTERM and tells the others; Ctrl-C is handed to it.
    """
    stop = Stop()
    if jax.process_count() > 1:
        handlers = {signal.SIGINT: lambda *_: os.kill(os.getpid(), signal.SIGTERM)}
    else:
        handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), stop.ask)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
