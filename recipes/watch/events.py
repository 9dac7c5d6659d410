"""TensorBoard event files. Free of jax; needs tensorboardX, which is imported with the first event."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipes.listeners import Listener, Row

FLUSH_S = 5.0  # a flush waits for the disk
START = "START"  # of a session: what older files have from this step on counts no more


class Events(Listener):
    """Writes the rows of a run as events into `folder`: each number under its name, at its step.

    A run that goes on (`begins(step)`) says so in a file of its own: events of later steps in older files then count no
    more, so that TensorBoard shows every step once. `config`: a text that is kept once, at the beginning of the run.

    The file is made with the first row: importing the writer takes 0.2 s, which the first step need not wait for. What
    cannot be written is said once on standard error and does not end the run.
    """

    def __init__(self, folder: str | Path, *, config: str = ""):
        self._folder, self._config = Path(folder), config
        self._after, self._writer, self._failed, self._flushed = 0, None, False, 0.0

    def begins(self, step: int) -> None:
        self._after = step

    def step(self, row: Row) -> None:
        self._attempt(lambda: self._write(row))

    def validated(self, row: Row) -> None:
        self.step(row)

    def saved(self, step: int, folder: str) -> None:
        self._attempt(self._flush)  # a run that is killed goes on from there and writes no earlier step again

    def ends(self, code: int) -> None:
        try:
            self._close()
        except OSError as error:
            print(f"the last events for TensorBoard are lost: {error.strerror or error}", file=sys.stderr)

    def _attempt(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._failed = True
            print(f"no more events for TensorBoard in {self._folder}: {error.strerror or error}", file=sys.stderr)
            with suppress(OSError):  # the same again
                self._close()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write(self, row: Row) -> None:
        from tensorboardX.proto import summary_pb2

        protos: Any = summary_pb2  # whose classes are made as it is imported
        if self._writer is None:
            self._writer = self._opened()
        values = [
            protos.Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._writer.write_event(_event(row["step"], summary=protos.Summary(value=values)))
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()
            self._flushed = time.monotonic()

    def _opened(self) -> Any:
        # Not SummaryWriter: it hands events to a thread through a queue of ten, and once that thread has died of a full
        # disk the eleventh event waits for ever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import text

        self._folder.mkdir(parents=True, exist_ok=True)
        # Names hold whole seconds, and files are read in the order of their names.
        writer = EventsWriter(str(self._folder / "events"), f".{time.time_ns()}")
        first = self._after + 1 if self._after else 0
        writer.write_event(_event(first, session_log={"status": START}))
        if self._config and not self._after:
            indented = "".join(f"    {line}\n" for line in self._config.splitlines())  # a block of code in Markdown
            writer.write_event(_event(0, summary=text("config", indented)))
        return writer


def _event(step: int, **fields: Any) -> Any:
    from tensorboardX.proto import event_pb2

    protos: Any = event_pb2
    return protos.Event(wall_time=time.time(), step=step, **fields)
