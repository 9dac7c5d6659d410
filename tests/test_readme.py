"""What the README shows works as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from recipes import schema

README = (Path(__file__).parents[1] / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^\$ zoo-train (?!-m )(.*)$", README, re.MULTILINE)
PLANS = re.findall(r"^\$ zoo-plan (.*)$", README, re.MULTILINE)


def test_the_readme_shows_programs_and_commands():
    assert len(PROGRAMS) == 5
    assert len(COMMANDS) >= 4
    assert len(PLANS) >= 4


@pytest.mark.parametrize("program", PROGRAMS, ids=["training", "own block", "own scan", "weights", "proof"])
def test_programs_run(program, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command):
    schema.register()
    with initialize_config_module("conf", version_base="1.3"):
        schema.read(compose("config", overrides=["run.dir=x", *shlex.split(command)]))


@pytest.mark.parametrize("command", re.findall(r"^\$ zoo-verify (.*)$", README, re.MULTILINE))
def test_commands_that_verify_compose(command):
    schema.register()
    with initialize_config_module("conf", version_base="1.3"):
        schema.read_verify(compose("verify", overrides=shlex.split(command)))


@pytest.mark.parametrize("command", PLANS)
def test_plans_compose(command):
    schema.register()
    with initialize_config_module("conf", version_base="1.3"):
        schema.read_plan(compose("plan", overrides=shlex.split(command)))
