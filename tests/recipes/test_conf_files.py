"""The files of `conf`: each composes, experiments stay what they are, and they are shown without jax."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

import conf
from recipes import schema
from recipes.plan.cases import tables
from zoo.checks import from_fields

CONF = Path(conf.__file__).parent
CHOICES = sorted((file.parent.name, file.stem) for file in CONF.glob("*/*.yaml"))
GOLDENS = Path(__file__).parent / "goldens"


def composed(*overrides: str, config: str = "config") -> DictConfig:
    schema.register()
    with initialize_config_module("conf", version_base="1.3"):
        return compose(config, overrides=["run.dir=runs/golden", "run.compile_cache=null", *overrides])


@pytest.mark.parametrize(("group", "option"), CHOICES, ids=map("=".join, CHOICES))
def test_every_file_of_conf_composes(group: str, option: str):
    if group == "experiment" and "/target" in (CONF / group / f"{option}.yaml").read_text():
        config, target, plan, _, compare = schema.read_plan(composed(f"{group}={option}", config="plan"))
        assert config.mesh.num_devices == target.devices
        assert compare or plan.published in tables()
    elif group in schema.SECTIONS or group == "experiment":
        asked = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()).items()
        filled = [f"{group}.{key}=x" for key, value in asked if value == "???"]
        assert schema.read(composed(f"{group}={option}", *filled)).train.steps > 0
    else:
        fields: Any = OmegaConf.to_container(composed(f"+{group}={option}")[group])
        assert dataclasses.asdict(from_fields(schema.GROUPS[group], fields, group)) == fields


def resolved(experiment: str) -> str:
    """The configuration of an experiment as YAML, a line for each key of a section."""
    tree: Any = yaml.compose(OmegaConf.to_yaml(composed(f"experiment={experiment}"), resolve=True))
    for _, section in tree.value:
        for _, value in section.value if isinstance(section, yaml.MappingNode) else ():
            if isinstance(value, yaml.MappingNode):
                value.flow_style = True
    return yaml.serialize(tree, width=100)


@pytest.mark.parametrize("experiment", ["debug_llama", "debug_deepseek"])
def test_experiments_are_what_they_were(experiment: str):
    golden, now = GOLDENS / f"{experiment}.yaml", resolved(experiment)
    if "ZOO_UPDATE_GOLDENS" in os.environ:
        golden.write_text(now)
    assert now.count("\n") < 110
    assert now == golden.read_text(), f"if it is meant: ZOO_UPDATE_GOLDENS=1 make test ARGS='-k {Path(__file__).stem}'"


def test_the_command_line_wins_over_the_experiment_and_that_over_the_defaults():
    """Case 25; case 27: a learning rate in scientific notation is a number."""
    config = schema.read(composed("experiment=debug_llama", "placement=host", "optimizer.learning_rate=2e-5"))
    assert (type(config.model).__name__, config.placement.default) == ("LlamaConfig", "host")
    assert config.optimizer.learning_rate == 2e-5


ASKED = {  # arguments of zoo-train -> what it prints
    "--cfg job train.steps=7": ["model:\n  vocab_size: 256", "steps: 7"],
    "--info": ["Config search path", "Defaults List", "vocab_size: 256"],
    "--info defaults experiment=debug_llama": ["model/debug_llama", "placement/device", "schema/optimizer"],
    "--help": ["zoo-train experiment=debug_deepseek", "blog_llama", "vocab_size: 256"],
}
PROGRAM = """
import sys
from recipes.cli.train import main
try:
    main()
finally:
    assert "jax" not in sys.modules, "jax was imported"
"""


@pytest.mark.parametrize(("arguments", "words"), ASKED.items(), ids=ASKED)
def test_the_configuration_is_shown_without_jax_and_without_a_trace(tmp_path: Path, arguments: str, words: list[str]):
    command = [sys.executable, "-c", PROGRAM, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [word for word in words if word not in done.stdout] == []
    assert list(tmp_path.iterdir()) == []
