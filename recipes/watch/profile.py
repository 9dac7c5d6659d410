"""`train.profile`: a trace of some steps for XProf, TensorBoard's profiler or Perfetto. Free of jax until it traces."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from zoo.checks import ConfigError

KEY = "train.profile"


def steps_to_profile(asked: str | None, steps: int) -> range:
    """`"10-12"` as `range(10, 13)`, `"10"` as one step, None as none.

    Raises ConfigError unless these are steps of a run of `steps` steps, from the second on: the first warms up.
    """
    if asked is None:
        return range(0)
    found = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", asked)
    if found is None:
        raise ConfigError(KEY, asked, "must be a step or a range of steps, as 10 or 10-12")
    first, last = int(found[1]), int(found[2] or found[1])
    if first > last:
        raise ConfigError(KEY, asked, "ends before it begins", hint=f"{KEY}={last}-{first}, perhaps")
    if first < 2:
        raise ConfigError(KEY, asked, "the first step warms up: from step 2 on")
    if last > steps:
        raise ConfigError(KEY, asked, f"the run has {steps} steps (train.steps)")
    return range(first, last + 1)


class Profile:
    """Traces the steps of `steps` into `folder`; a context manager.

    `after`: the step that the run goes on from. A run that goes on behind the first of the steps traces none of them:
    `missed` then says so.
    """

    def __init__(self, folder: str | Path, steps: range, *, after: int = 0):
        self._folder, self._steps = str(folder), steps
        self.missed = bool(steps) and after >= steps.start - 1 and after > 0
        self._tracing = False
        if self.missed:
            self._steps = range(0)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()  # of a run that ends within the steps

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the whole of a step, until its results are there."""
        with self._annotation(number):
            yield
        if number == self._steps.stop - 1:
            self._stop()

    def _annotation(self, number: int) -> Any:
        if number not in self._steps:
            return nullcontext()
        import jax

        if not self._tracing:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def _stop(self) -> None:
        if self._tracing:
            import jax

            self._tracing = False
            jax.profiler.stop_trace()
            print(f"trace of the steps written to {self._folder}")
