"""`train.profile`: which steps it takes, and that the trace holds exactly those."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from recipes.watch.profile import Profile, steps_to_profile
from zoo.checks import ConfigError


@pytest.mark.parametrize(
    ("asked", "steps"),
    [("10-12", range(10, 13)), ("10", range(10, 11)), ("2-300", range(2, 301)), (None, range(0))],
)
def test_steps_are_a_range_with_both_ends(asked: str | None, steps: range):
    assert steps_to_profile(asked, 300) == steps


WRONG = {
    "12-10": r"(?s)train\.profile=12-10: ends before it begins.*did you mean 10-12\?",
    "1-3": r"train\.profile=1-3: must begin with step 2 or later",
    "0": r"train\.profile=0: must begin with step 2",
    "299-301": r"train\.profile=299-301: the run has 300 steps",
    "ten": r"train\.profile=ten: must be a step or a range of steps, as 10 or 10-12",
    "": "must be a step or a range",
    "10-": "must be a step or a range",
    "-10": "must be a step or a range",
    "1.5": "must be a step or a range",
    "10-12-14": "must be a step or a range",
    "٣": "must be a step or a range",  # a digit to Python
}


@pytest.mark.parametrize(("asked", "message"), WRONG.items())
def test_what_is_no_range_of_the_steps_is_refused(asked: str, message: str):
    with pytest.raises(ConfigError, match=message):
        steps_to_profile(asked, 300)


def run(profile: Profile, begun: int, last: int) -> None:
    """Steps of a product; the run ends after `last`."""
    step = jax.jit(lambda x: jnp.sin(x @ x))
    x = step(jnp.ones((8, 8)))
    profile.begins(begun)
    for number in range(begun + 1, last + 1):
        profile.starts(number)
        x = jax.block_until_ready(step(x))
        profile.step({"step": number})
    profile.ends(0)


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # of jaxlib
def annotated(folder: Path) -> list[int]:
    """The steps that the traces of a folder hold."""
    steps = []
    for file in folder.rglob("*.xplane.pb"):
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        events = [event for plane in planes for line in plane.lines for event in line.events]
        steps += [dict(event.stats)["step_num"] for event in events if event.name == "train"]
    return sorted(steps)


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # of jaxlib
def test_the_trace_holds_exactly_the_steps_asked_for(tmp_path, capsys):
    run(Profile(tmp_path / "asked", range(3, 5)), begun=0, last=6)
    assert annotated(tmp_path / "asked") == [3, 4]
    assert f"trace of steps 3 to 4 written to {tmp_path / 'asked'}" in capsys.readouterr().out
    run(Profile(tmp_path / "ended", range(3, 8)), begun=0, last=4)
    assert annotated(tmp_path / "ended") == [3, 4]
    assert f"trace of steps 3 to 4 written to {tmp_path / 'ended'}" in capsys.readouterr().out
    run(Profile(tmp_path / "resumed", range(8, 9)), begun=6, last=9)
    assert annotated(tmp_path / "resumed") == [8]


@pytest.mark.parametrize("begun", [2, 3, 5, 9])
def test_a_run_that_goes_on_behind_the_first_step_traces_none_and_says_so(tmp_path, capsys, begun: int):
    run(Profile(tmp_path / "late", range(3, 6)), begun=begun, last=begun + 2)
    assert not (tmp_path / "late").exists()
    assert f"no trace: the run goes on with step {begun + 1}" in capsys.readouterr().out


def test_a_trace_that_cannot_be_started_ends_no_run(tmp_path, capsys):
    run(Profile(tmp_path / "outer", range(2, 4)), begun=0, last=1)
    with jax.profiler.trace(str(tmp_path / "other")):
        run(Profile(tmp_path / "second", range(2, 4)), begun=0, last=5)
    assert "no trace in" in capsys.readouterr().err
