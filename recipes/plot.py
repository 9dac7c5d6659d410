"""The picture of a run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def plot_loss(losses: Sequence[float], validation: tuple[int, float] | None, title: str, path: Path) -> None:
    """Training loss by step with its running mean, and the validation loss where it was taken."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training loss")
    window = max(1, len(losses) // 25)
    if window > 1:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color="tab:blue", label=f"mean of {window} steps")
    if validation is not None:
        step, loss = validation
        axes.plot([step], [loss], "o", color="tab:red", label=f"validation loss {loss:.3f}")
    axes.set(xlabel="step", ylabel="nats a token", title=title, xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
