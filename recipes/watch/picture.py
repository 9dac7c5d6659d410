"""The picture of a run. Free of jax; needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.watch.history import History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEW = 20  # steps that are drawn as points
_POINTS = 1000  # more steps than that are drawn as the band between the least and the most of a few
_INK, _BLUE, _RED, _ORANGE = "#333333", "#1f6fb4", "#c62f2f", "#e08214"


def plot(history: History, path: str | Path, title: str = "") -> None:
    """Writes the picture of a run as a PNG: `drawn`."""
    drawn(history, title).savefig(path, dpi=120, format="png")


def drawn(history: History, title: str = "") -> "Figure":
    """Loss, gradient norm, expert load, step time and learning rate by step, each if there is any.

    Validation losses stand where they were taken; below, ticks mark steps without an update, triangles spikes of the
    gradient norm. Axes show what most steps have: single values beyond are cut, never the curve of the means.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    small = [draw for draw, name in _SMALL if history.has(name)]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, max(1, len(small)), height_ratios=(3, 2))
    _loss(figure.add_subplot(grid[0, :]), history)
    for column, draw in enumerate(small):
        draw(figure.add_subplot(grid[1, column]), history)
    for axes in figure.axes:
        axes.set_xlim(history["step"][0] - 0.5, history["step"][-1] + 0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.tick_params(labelsize=8, colors=_INK)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        nbins = 10 if axes is figure.axes[0] else 4
        axes.locator_params(axis="x", integer=True, nbins=nbins, min_n_ticks=1)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK)
    return figure


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the finite values within half a window of each, NaN where there is none.

    At the beginning, where curves are steep, the window is narrower, so that it reaches as far ahead as back.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    centre = np.arange(len(values))
    half = np.minimum(window // 2, centre)
    first, last = centre - half, np.minimum(len(values), centre + half + 1)
    count = counts[last] - counts[first]
    return np.where(count, (sums[last] - sums[first]) / np.maximum(count, 1), np.nan)


def _loss(axes: Any, history: History) -> None:
    steps, losses = history["step"], history["loss"]
    _cloud(axes, steps, losses, "training")
    window = max(1, len(losses) // 25)
    mean = smoothed(np.where(history.spikes, np.nan, losses), window)
    if window > 1:
        axes.plot(steps, mean, color=_BLUE, linewidth=1.8, label=f"training, mean of {window:,} steps")
    if history.validation.size:
        step, best = history.best or (0, np.nan)
        label = f"validation, best {best:.4f} at step {step:,}"
        axes.plot(*history.validation, "o-", color=_ORANGE, markersize=4.5, linewidth=1, label=label, clip_on=False)
    _limit(axes, losses, np.concatenate([mean[len(mean) // 50 :], history.validation[1]]))
    _marks(axes, history, losses)
    axes.set_title("loss, nats a token", loc="left", fontsize=10, color=_INK)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def _grad_norm(axes: Any, history: History) -> None:
    norms = history["grad_norm"]
    _cloud(axes, history["step"], norms, None)
    axes.plot(history["step"], _geometric(np.where(history.spikes, np.nan, norms)), color=_BLUE, linewidth=1.5)
    axes.set_yscale("log")
    _marks(axes, history, norms)
    axes.set_title("gradient norm, before clipping", loc="left", fontsize=10, color=_INK)


def _expert_load(axes: Any, history: History) -> None:
    loads = history["expert_load"]
    _cloud(axes, history["step"], loads, None)
    axes.plot(history["step"], smoothed(loads, max(1, len(loads) // 25)), color=_BLUE, linewidth=1.5)
    _limit(axes, loads, np.array([1.0]))
    axes.axhline(1, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_title("expert load, largest over mean", loc="left", fontsize=10, color=_INK)


def _step_time(axes: Any, history: History) -> None:
    seconds = history["step_s"]
    median = float(np.nanmedian(seconds))
    scale, unit = (1000, "ms") if median < 1 else (1, "s")
    _cloud(axes, history["step"], seconds * scale, None)
    axes.axhline(median * scale, color=_BLUE, linewidth=1.5)
    _limit(axes, seconds * scale, np.array([0.0, 1.5 * median * scale]), share=0.95)
    axes.set_title(f"step time, {unit}, median {median * scale:.3g}", loc="left", fontsize=10, color=_INK)


def _learning_rate(axes: Any, history: History) -> None:
    rates = history["learning_rate"]
    power = int(np.floor(np.log10(np.nanmax(rates)))) if np.nanmax(rates) > 0 else 0
    axes.plot(history["step"], rates / 10.0**power, color=_BLUE, linewidth=1.5)
    axes.set_ylim(bottom=0)
    axes.set_title(f"learning rate, 1e{power}", loc="left", fontsize=10, color=_INK)


_SMALL = (
    (_grad_norm, "grad_norm"),
    (_expert_load, "expert_load"),
    (_step_time, "step_s"),
    (_learning_rate, "learning_rate"),
)


def _cloud(axes: Any, steps: np.ndarray, values: np.ndarray, label: str | None) -> None:
    """Every value, faint: as a line, or of a long run as a band."""
    if len(values) <= _POINTS:
        faint: dict[str, Any] = {"color": _BLUE, "alpha": 0.35, "linewidth": 0.9}
        axes.plot(steps, values, marker="." if len(values) < _FEW else "", label=label, **faint)
        return
    starts = np.arange(0, len(values), -(-len(values) // _POINTS))
    least = np.fmin.reduceat(values, starts)
    most = np.fmax.reduceat(values, starts)
    axes.fill_between(steps[starts], least, most, color=_BLUE, alpha=0.25, linewidth=0, label=label)


def _limit(axes: Any, values: np.ndarray, shown: np.ndarray, share: float = 0.98) -> None:
    """Limits that hold this share of the values, where they are enough to tell, and all that must be `shown`."""
    values, shown = values[np.isfinite(values)], shown[np.isfinite(shown)]
    if not values.size:
        return
    ends = np.concatenate([np.quantile(values, [0.0, share if (1 - share) * len(values) >= 1 else 1.0]), shown])
    margin = 0.05 * (ends.max() - ends.min()) or 0.5
    axes.set_ylim(ends.min() - (margin if ends.min() else 0), ends.max() + margin)


def _geometric(values: np.ndarray) -> np.ndarray:
    """The smoothed curve of what has a logarithmic scale."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(smoothed(np.log(values), max(1, len(values) // 25)))


def _marks(axes: Any, history: History, values: np.ndarray) -> None:
    """Steps without an update as ticks along the axis, spikes as triangles at their value, or at the upper edge."""
    steps, bad, spikes = history["step"], history.bad, history.spikes
    if bad.any():
        count = f"{bad.sum()} steps without update" if bad.sum() > 1 else "a step without update"
        along = np.zeros(bad.sum())
        axes.plot(steps[bad], along, "|", transform=axes.get_xaxis_transform(), color=_RED, markersize=14, label=count)
    if spikes.any():
        count = f"{spikes.sum()} spikes of the gradient norm" if spikes.sum() > 1 else "a spike of the gradient norm"
        top = axes.get_ylim()[1]
        height = np.minimum(values[spikes], top)
        axes.plot(steps[spikes], height, "v", color=_RED, markersize=6, clip_on=False, label=count)
