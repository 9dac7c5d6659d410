"""TensorBoard's event files, read back record by record with the checksums of the format."""

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from recipes.watch.events import Events

PROTOS: Any = event_pb2  # whose classes are made as it is imported


def records(file: Path) -> list[Any]:
    """The events of a file, whose checksums must be right."""
    data, events = file.read_bytes(), []
    while data:
        (length,), header = struct.unpack("Q", data[:8]), data[:8]
        body, rest = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("I", data[8:12])[0] == masked_crc32c(header)
        assert struct.unpack("I", rest[:4])[0] == masked_crc32c(body)
        events.append(PROTOS.Event.FromString(body))
        data = rest[4:]
    return events


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """`(step, name, value)` as TensorBoard shows them: a START takes away all from its step on that came before it."""
    found: list[tuple[int, str, float]] = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in records(file):
            if event.session_log.status == PROTOS.SessionLog.START:
                found = [each for each in found if each[0] < event.step]
            for value in event.summary.value:
                text = value.metadata.plugin_data.plugin_name == "text"
                found.append((event.step, value.tag, math.nan if text else value.simple_value))
    return found


def write(folder: Path, after: int, rows: list[dict[str, float]], config: str = "") -> None:
    events = Events(folder, config=config)
    events.begins(after)
    for row in rows:
        (events.validated if "validation_loss" in row else events.step)(row)
    events.ends(0)


def test_every_figure_stands_under_its_name_at_its_step(tmp_path):
    write(tmp_path, 0, [{"step": 1, "loss": 2.5, "step_s": 0.5}, {"step": 2, "loss": 2.25}], "a: 1\nb: {c: é}")
    write(tmp_path, 2, [{"step": 2, "validation_loss": 2.0}])
    found = [each for each in scalars(tmp_path) if each[1] != "config/text_summary"]
    assert found == [(1, "loss", 2.5), (1, "step_s", 0.5), (2, "loss", 2.25), (2, "validation_loss", 2.0)]


def test_no_step_stands_twice_however_often_a_run_starts(tmp_path):
    steps = [{"step": step, "loss": float(step)} for step in range(1, 6)]
    write(tmp_path, 0, steps, "first")
    write(tmp_path, 3, [{"step": step, "loss": step + 0.5} for step in range(4, 8)], "second")
    write(tmp_path, 5, [{"step": 6, "loss": 0.25}], "third")
    assert scalars(tmp_path) == [
        (0, "config/text_summary", pytest.approx(math.nan, nan_ok=True)),
        *((step, "loss", float(step)) for step in (1, 2, 3)),
        *((step, "loss", step + 0.5) for step in (4, 5)),
        (6, "loss", 0.25),
    ]
    write(tmp_path, 0, steps[:1], "anew")
    assert [each[:2] for each in scalars(tmp_path)] == [(0, "config/text_summary"), (1, "loss")]


def test_what_a_checkpoint_holds_is_on_the_disk_before_it(tmp_path):
    events = Events(tmp_path)
    events.begins(0)
    for step in (1, 2, 3):
        events.step({"step": step, "loss": 1.0})
    events.saved(3, "a folder")
    assert [step for step, *_ in scalars(tmp_path)] == [1, 2, 3]  # as if the process were killed now
    events.ends(0)


def test_the_configuration_is_a_block_of_code(tmp_path):
    write(tmp_path, 0, [{"step": 1, "loss": 1.0}], "model:\n  dim: 16")
    (file,) = tmp_path.glob("events.out.tfevents.*")
    (text,) = [value for event in records(file) for value in event.summary.value if value.tag.startswith("config")]
    assert text.tensor.string_val == [b"    model:\n      dim: 16\n"]


def test_what_is_no_number_is_left_out_and_a_run_without_rows_leaves_no_file(tmp_path):
    write(tmp_path / "none", 0, [])
    assert not (tmp_path / "none").exists()
    write(tmp_path, 0, [{"step": 1, "loss": math.nan, "note": "text"}])  # type: ignore[dict-item]
    ((step, name, value),) = scalars(tmp_path)
    assert (step, name) == (1, "loss")
    assert math.isnan(value)


def test_a_full_disk_is_said_once_and_ends_no_run(tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    events = Events(tmp_path)
    events.begins(0)
    events.step({"step": 1, "loss": 1.0})
    monkeypatch.setattr(EventsWriter, "write_event", full)
    for step in (2, 3):
        events.step({"step": step, "loss": 1.0})
    events.ends(0)
    assert capsys.readouterr().err == f"no more events for TensorBoard in {tmp_path}: No space left on device\n"
    assert scalars(tmp_path) == [(1, "loss", 1.0)]
