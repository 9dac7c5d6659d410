"""Ctrl-C and SIGTERM ask a run to stop after the step at hand."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKING = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Which signal asked, None if none did."""

    signal: int | None = None

    @property
    def code(self) -> int:
        """The exit code of a run that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Takes note of a signal; a second one interrupts at once."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Signals that ask to stop are noted within. Call it in the main thread."""
    stop = Stop()
    before = {number: signal.signal(number, stop.ask) for number in ASKING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
