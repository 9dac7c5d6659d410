"""What is read from a run's log, said of it and drawn of it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.watch import Device, History, plot, summarise
from recipes.watch.picture import drawn, smoothed
from tests import helpers

NAN = math.nan


def row(step: int, **fields: Any) -> dict[str, Any]:
    known = {"loss": 4.0 - step / 10, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_s": 100.0, "step_s": 0.5}
    return {"step": step, **known, **fields}


ROWS = [
    row(1, step_s=2.0, tokens_per_s=25.0),
    row(2, grad_norm=NAN),
    row(3, loss=NAN),
    {"step": 3, "validation_loss": 3.5},
    row(4, grad_norm=40.0, spike=40.0),
    row(5, device_peak_bytes=3 * 2**30),
    {"step": 5, "validation_loss": 3.25},
    row(6, device_peak_bytes=2**30),
    {"step": 6, "validation_loss": 3.75},
]


def test_a_log_is_read_with_what_was_unusual_and_without_a_torn_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(each) + "\n" for each in ROWS) + '{"step": 7, "lo')
    history = History.read(log)
    assert len(history) == 6
    assert list(history["step"]) == [1, 2, 3, 4, 5, 6]
    assert list(history["step"][history.bad]) == [2, 3]
    assert list(history["step"][history.spikes]) == [4]
    assert history.validation.tolist() == [[3, 5, 6], [3.5, 3.25, 3.75]]
    assert history.best == (5, 3.25)
    assert history.device_peak_bytes == 3 * 2**30
    assert (history.has("step_s"), history.has("expert_load")) == (True, False)


def test_a_run_without_validation_or_memory_has_none():
    history = History.of([row(1)])
    assert (history.best, history.device_peak_bytes, history.validation.shape) == (None, None, (2, 0))
    assert len(History.of([])) == 0
    assert summarise(History.of([]), steps=3) == ""


def test_the_summary_says_how_far_how_fast_how_well():
    """Two starts: the second after step 2. Each step has 50 tokens; 4 devices of 1 TFLOP/s, 20 GFLOP a token."""
    device = Device(flops_per_token=20e9, count=4, peak_flops_per_s=1e12, memory_bytes=4 * 2**30)
    text = summarise(
        History.of(ROWS), steps=10, begun=2, wall_s=75.0, device=device, stalls=[6], checkpoint="runs/a/checkpoints/6"
    )
    assert text.splitlines() == [
        "steps      6 of 10, 300 tokens, 4.5 s in steps, 0:01:15 in all since step 2",
        "speed      100 tokens/s, 500 ms a step (median), 0.5 TFLOP/s a device, 50.0% of 1 (MFU)",
        "memory     at most 3.00 of 4.00 GiB on a device",
        "loss       3.6400 in training (mean of the last 5), best in validation 3.2500 at step 5, last 3.7500",
        "unusual    2 steps without update (2, 3), 1 spike of the gradient norm (4), 1 stall (6)",
        "checkpoint runs/a/checkpoints/6",
    ]


def test_the_summary_of_an_ordinary_run_is_short():
    text = summarise(History.of([row(step) for step in (1, 2)]), steps=2)
    assert [line.split()[0] for line in text.splitlines()] == ["steps", "speed", "loss"]
    assert "NaN" not in text


def test_the_mean_of_a_window_leaves_out_what_is_not_finite():
    values = np.array([1.0, 3.0, NAN, 5.0, math.inf, 10.0])
    helpers.assert_close(smoothed(values, 1)[[0, 1, 3, 5]], values[[0, 1, 3, 5]], helpers.FLOAT64)
    # Of three: the first alone, since nothing is before it; the last with the one before.
    helpers.assert_close(smoothed(values, 3), np.array([1.0, 2.0, 4.0, 5.0, 7.5, 10.0]), helpers.FLOAT64)
    assert np.isnan(smoothed(np.full(3, NAN), 3)).all()


def long(steps: int) -> History:
    """A run of many steps: an expert's load, a spike at 150, no update at 160, validation every 50."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = NAN if step == 160 else 4.0 if step == 150 else 2.0 + 8.0 / step
        spike = {"spike": 30.0} if step == 150 else {}
        rows.append(row(step, loss=loss, grad_norm=30.0 if step == 150 else 1.0, expert_load=1.5, **spike))
        if step % 50 == 0:
            rows.append({"step": step, "validation_loss": 2.0 + 10.0 / step})
    return History.of(rows)


def points(axes: Any, marker: str) -> list[float]:
    return [float(x) for line in axes.lines if line.get_marker() == marker for x in line.get_xdata()]


@pytest.mark.parametrize("steps", [200, 2500])
def test_the_picture_shows_every_step_validation_where_it_was_and_what_was_unusual(steps: int):
    figure = drawn(long(steps), "a run")
    loss, norm, *_ = figure.axes
    titles = [axes.get_title(loc="left").split(",")[0] for axes in figure.axes]
    assert titles == ["loss", "gradient norm", "expert load", "step time", "learning rate"]
    assert points(loss, "o") == list(range(50, steps + 1, 50))
    for axes in (loss, norm):
        assert (points(axes, "v"), points(axes, "|")) == ([150.0], [160.0])
    for axes in figure.axes:
        assert axes.get_xlim() == (0.5, steps + 0.5)
    # The first losses, 10 and 6, would press the rest together; the curve of the means is seen from its start on.
    low, high = loss.get_ylim()
    assert low < 2.0
    assert 2.2 < high < 9.0


def test_a_picture_without_experts_has_no_panel_of_them_and_a_single_step_is_drawn(tmp_path: Path):
    for rows in ([row(1)], [row(1, loss=NAN, grad_norm=NAN)], [row(step) for step in range(1, 30)]):
        titles = [axes.get_title(loc="left") for axes in drawn(History.of(rows)).axes]
        assert not any(title.startswith("expert load") for title in titles)
    plot(History.of([row(1)]), tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
