"""`train.profile`: a trace of some steps for XProf, TensorBoard's profiler or Perfetto. Free of jax until it traces."""

import re
import sys
from pathlib import Path
from typing import Any

from recipes.listeners import Listener, Row
from zoo.checks import ConfigError

KEY = "train.profile"


def steps_to_profile(asked: str | None, steps: int) -> range:
    """`"10-12"` as `range(10, 13)`, `"10"` as one step, None as none.

    Raises ConfigError unless these are steps of a run of `steps` steps, from the second on: the first warms up.
    """
    if asked is None:
        return range(0)
    found = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", asked)
    if found is None:
        raise ConfigError(KEY, asked, "must be a step or a range of steps, as 10 or 10-12")
    first, last = int(found[1]), int(found[2] or found[1])
    if first > last:
        raise ConfigError(KEY, asked, "ends before it begins", hint=f"did you mean {last}-{first}?")
    if first < 2:
        raise ConfigError(KEY, asked, "must begin with step 2 or later: the first step warms up")
    if last > steps:
        raise ConfigError(KEY, asked, f"the run has {steps} steps (train.steps)")
    return range(first, last + 1)


class Profile(Listener):
    """Traces `steps` of a run into `folder`, each annotated with its number.

    A run that goes on behind the first of them traces none and says so: what it measured would not be what was asked
    for. Nor does a trace that fails end the run.
    """

    def __init__(self, folder: str | Path, steps: range):
        self._folder, self._steps = str(folder), steps
        self._tracing, self._last = False, 0
        self._annotation: Any = None

    def begins(self, step: int) -> None:
        if self._steps and step > 0 and step + 1 >= self._steps.start:
            print(f"no trace: the run goes on with step {step + 1}, and {KEY} begins with {self._steps.start}")
            self._steps = range(0)

    def starts(self, step: int) -> None:
        if step not in self._steps:
            return
        import jax

        if step == self._steps.start:
            try:
                jax.profiler.start_trace(self._folder)
            except (OSError, RuntimeError) as error:
                self._give_up(error)
                return
            self._tracing = True
        self._last = step
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._annotation.__enter__()

    def step(self, row: Row) -> None:
        self._leave()
        if row["step"] == self._steps.stop - 1:
            self._stop()

    def ends(self, code: int) -> None:
        self._leave()
        self._stop()

    def _leave(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _stop(self) -> None:
        if not self._tracing:
            return
        import jax

        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        else:
            print(f"trace of steps {self._steps.start} to {self._last} written to {self._folder}")

    def _give_up(self, error: Exception) -> None:
        self._steps = range(0)
        print(f"no trace in {self._folder}: {error}", file=sys.stderr)
