"""TensorBoard event files. Free of jax; needs tensorboardX, which is imported with the first event."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLUSH_S = 5.0  # a flush waits for the disk


class Events:
    """Writes rows of figures as events into `folder`; a context manager.

    `after`: the step that the run goes on from. Events of later steps in older files of the folder then count no more
    (TensorBoard purges them), so that no step stands twice. `config`: a text that is kept once, with a run's beginning.
    The file is made with the first row: importing the writer takes 0.2 s, which the first step need not wait for.
    """

    def __init__(self, folder: str | Path, *, after: int = 0, config: str = ""):
        self._folder, self._after, self._config = Path(folder), after, config
        self._writer: Any = None
        self._flushed = 0.0

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def row(self, row: Mapping[str, Any]) -> None:
        """The numbers of one row of `metrics.jsonl`, under their names, at its `step`."""
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._write(step=row["step"], summary=Summary(value=values))
        if time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Waits until everything stands on the disk."""
        if self._writer is not None:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if self._writer is None:
            self._open()
        self._writer.write_event(Event(wall_time=time.time(), **fields))

    def _open(self) -> None:
        # Not SummaryWriter: it hands events to a thread through a queue of ten, and once that thread has died of a full
        # disk the eleventh event waits for ever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import text

        self._folder.mkdir(parents=True, exist_ok=True)
        # Names hold whole seconds, and files are read in the order of their names.
        self._writer = EventsWriter(str(self._folder / "events"), f".{time.time_ns()}")
        if self._after:
            self._write(step=self._after + 1, session_log=SessionLog(status=SessionLog.START))
        elif self._config:
            indented = "".join(f"    {line}\n" for line in self._config.splitlines())  # a block of code in Markdown
            self._write(step=0, summary=text("config", indented))
