"""What is said at the end of a run. Free of jax."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from recipes.watch.history import History

_NAMED = 6  # steps that a line names
_LAST = 10  # at least so many losses are averaged


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a step asks of a device and what that has: peak of matrix products in bfloat16, memory (None: unknown)."""

    flops_per_token: float
    count: int
    peak_flops_per_s: float
    memory_bytes: int | None = None


def summarise(
    history: History,
    *,
    steps: int,
    begun: int = 0,
    wall_s: float | None = None,
    device: Device | None = None,
    stalls: Sequence[int] = (),
    checkpoint: str | None = None,
) -> str:
    """A few lines: how far, how fast, how well, what was unusual, and where the last checkpoint is.

    `steps` were asked for; the last start of the run went on after `begun` of them and took `wall_s`, compiling,
    validation and checkpoints included. Speed and `stalls` are of that start, tokens and losses of the whole run.
    """
    if not len(history):
        return ""
    lines = {
        "steps": _steps(history, steps, begun, wall_s),
        "speed": _speed(history, begun, device),
        "memory": _memory(history, device),
        "loss": _loss(history),
        "unusual": _unusual(history, stalls),
        "checkpoint": checkpoint,
    }
    return "\n".join(f"{name:<11}{line}" for name, line in lines.items() if line)


def _steps(history: History, steps: int, begun: int, wall_s: float | None) -> str:
    tokens = np.nansum(history["tokens_per_s"] * history["step_s"])
    words = [f"{int(history['step'][-1]):,} of {steps:,}", f"{tokens:,.0f} tokens"]
    words.append(f"{_duration(np.nansum(history['step_s']))} in steps")
    if wall_s is not None:
        words.append(f"{_duration(wall_s)} in all" + (f" since step {begun}" if begun else ""))
    return ", ".join(words)


def _speed(history: History, begun: int, device: Device | None) -> str | None:
    ours = history["step"] > begun
    seconds = history["step_s"][ours]
    if not seconds.size:
        return None
    tokens_per_s = np.nansum(history["tokens_per_s"][ours] * seconds) / np.nansum(seconds)
    words = [f"{tokens_per_s:,.0f} tokens/s", f"{_seconds(float(np.nanmedian(seconds)))} a step (median)"]
    if device is not None:
        used = device.flops_per_token * tokens_per_s / device.count
        share = f"{used / device.peak_flops_per_s:.1%} of {device.peak_flops_per_s / 1e12:,.0f}"
        words.append(f"{used / 1e12:,.1f} TFLOP/s a device, {share} (MFU)")
    return ", ".join(words)


def _memory(history: History, device: Device | None) -> str | None:
    if history.device_peak_bytes is None:
        return None
    most = f"{history.device_peak_bytes / 2**30:.2f}"
    if device is None or device.memory_bytes is None:
        return f"at most {most} GiB on a device"
    return f"at most {most} of {device.memory_bytes / 2**30:.2f} GiB on a device"


def _loss(history: History) -> str:
    losses = history["loss"][np.isfinite(history["loss"])]
    last = losses[-max(_LAST, len(losses) // 25) :]
    words = [f"{last.mean():.4f} in training (mean of the last {len(last)})"] if last.size else ["never finite"]
    if (best := history.best) is not None:
        step, loss = best
        words.append(f"best in validation {loss:.4f} at step {step:,}")
        if history.validation[0, -1] != step:
            words.append(f"last {history.validation[1, -1]:.4f}")
    return ", ".join(words)


def _unusual(history: History, stalls: Sequence[int]) -> str:
    bad, spikes = history["step"][history.bad], history["step"][history.spikes]
    words = [f"{_count(len(bad), 'step')} without update ({_named(bad)})"] if bad.size else []
    if spikes.size:
        words.append(f"{_count(len(spikes), 'spike')} of the gradient norm ({_named(spikes)})")
    if stalls:
        words.append(f"{_count(len(stalls), 'stall')} ({_named(stalls)})")
    return ", ".join(words)


def _named(steps: Iterable[float]) -> str:
    """The first of them by number."""
    words = [f"{step:.0f}" for step in steps]
    return ", ".join(words[:_NAMED]) + (", ..." if len(words) > _NAMED else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _duration(seconds: float) -> str:
    return _seconds(seconds) if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
