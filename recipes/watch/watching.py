"""All that watches a run, as one listener of it."""

import sys
import time
from pathlib import Path
from typing import Any

import jax

import zoo
from recipes.config import Config
from recipes.listeners import Listener, Listeners
from recipes.record import LOG
from recipes.watch.events import Events
from recipes.watch.history import History
from recipes.watch.profile import Profile, steps_to_profile
from recipes.watch.stall import Watchdog
from recipes.watch.summary import Device, summarise
from recipes.watch.utilisation import known_target, training_flops

PICTURE, TRACES = "metrics.png", "profile"


class Watching(Listeners):
    """Stalls, the trace of `train.profile`, events for TensorBoard, and `report` at the end.

    `folder`: where `metrics.jsonl` is written, None in all processes but the first: there only stalls are watched.
    """

    def __init__(self, config: Config, folder: str | None, resolved_config: str):
        train = config.train
        self._config, self._folder = config, None if folder is None else Path(folder)
        self._started, self._begun = time.monotonic(), 0
        self._checkpoint: str | None = None
        self._watchdog = Watchdog(train.stall_factor)
        listeners: list[Listener] = [self._watchdog]
        if self._folder is not None:
            listeners.append(Profile(self._folder / TRACES, steps_to_profile(train.profile, train.steps)))
            if train.tensorboard:
                listeners.append(Events(self._folder, config=resolved_config))
        super().__init__(listeners)

    def begins(self, step: int) -> None:
        self._begun = step
        super().begins(step)

    def saved(self, step: int, folder: str) -> None:
        self._checkpoint = folder
        super().saved(step, folder)

    def report(self) -> None:
        """Prints the summary and draws the picture, of all steps that the log has."""
        if self._folder is None:
            return
        history = History.read(self._folder / LOG)
        if not len(history):
            return
        print(
            summarise(
                history,
                steps=self._config.train.steps,
                begun=self._begun,
                wall_s=time.monotonic() - self._started,
                device=figures(self._config, jax.local_devices()[0]),
                stalls=self._watchdog.stalls,
                checkpoint=self._checkpoint,
            )
        )
        # Importing matplotlib takes a second, which the first step need not wait for.
        from recipes.watch.picture import plot

        name = type(self._config.model).__name__.removesuffix("Config")
        title = f"{name}, step {history['step'][-1]:,.0f} of {self._config.train.steps:,}"
        try:
            plot(history, self._folder / PICTURE, title)
        except OSError as error:  # the run is over, and its figures are written
            print(f"{self._folder / PICTURE} cannot be written: {error.strerror}", file=sys.stderr)


def figures(config: Config, device: Any) -> Device | None:
    """What there is to say of the devices of a run, of which `device` is one; None of a kind without known figures.

    Nor of a run that freezes parameters: there are gradients that it does not compute.
    """
    target = None if device.platform == "cpu" or config.train.freeze else known_target(device.device_kind)
    if target is None:
        return None
    return Device(
        flops_per_token=training_flops(zoo.abstract(config.model), config.train.sequence_length),
        count=config.mesh.num_devices,
        peak_flops_per_s=target.bf16_flops_per_s,
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
    )
