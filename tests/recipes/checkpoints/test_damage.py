"""A damaged checkpoint is refused, naming folder and leaf, or gives the same state to the bit: never another one."""

import dataclasses
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import yaml
from hypothesis import given, settings, strategies as st

import recipes
import zoo
from recipes.checkpoints import folder as folders
from recipes.checkpoints.resume import find, resumed
from recipes.checkpoints.run import Checkpoints
from recipes.config import Config, RunConfig
from recipes.data.source import load
from tests import helpers
from tests.recipes.checkpoints.common import LLAMA, read
from zoo.checks import ConfigError


class Small:
    """In the place of a run's `Setup`: a state of a tiny model, made without compiling, and what is wanted of one."""

    def __init__(self, config: Config):
        self.config = config
        model = helpers.drawn(lambda: zoo.build(config.model, key=jax.random.key(0)))
        placed, self.optimizer = recipes.place(model, recipes.Placement(default="remat")), optax.adam(1e-3)
        self.state = recipes.init_state(placed, self.optimizer, jnp.bfloat16)

    def abstract_state(self) -> Any:
        return jax.eval_shape(lambda: self.state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Small, Path, str]:
    """A run's parts, its folder with a checkpoint, and its configuration."""
    root = tmp_path_factory.mktemp("saved")
    config, text = read(*LLAMA, "model.num_layers=1", f"run.dir={root}")
    corpus = load(config.data, config.model.vocab_size)
    small, checkpoints = Small(config), Checkpoints(config, text, corpus)
    checkpoints.save(small.state, 0)
    checkpoints.wait()
    return small, root, text


def goes_on(small: Small, root: Path) -> Any:
    config = dataclasses.replace(small.config, run=RunConfig(dir=str(root)))
    found = find(config)
    return None if found is None else resumed(found, small)  # type: ignore[arg-type]


@contextmanager
def damaged(root: Path, kind: str, number: int, place: float, bit: int) -> Iterator[str]:
    """One of the files below `root` is damaged within."""
    files = sorted(file for file in root.rglob("*") if file.is_file())
    file = files[number % len(files)]
    content = file.read_bytes()
    at = min(int(place * len(content)), max(0, len(content) - 1))
    changed = bytearray(content)
    match kind:
        case "flip" if content:
            changed[at] ^= 1 << bit
            file.write_bytes(changed)
        case "truncate":
            file.write_bytes(content[:at])
        case _:
            file.unlink()
    yield f"{kind} {file}, byte {at} of {len(content)}, bit {bit}"
    file.write_bytes(content)


@settings(max_examples=2000 if helpers.LONG else 60)
@given(
    kind=st.sampled_from(["flip", "flip", "truncate", "delete"]),
    number=st.integers(0, 2**16),
    place=st.floats(0, 1),
    bit=st.integers(0, 7),
)
def test_a_damaged_checkpoint_is_refused_or_equal(saved, kind, number, place, bit):
    small, root, _ = saved
    state, refused = None, ""
    with damaged(root, kind, number, place, bit) as what:
        try:
            state = goes_on(small, root)
        except ConfigError as error:
            refused = str(error)
    if refused:
        assert f"checkpoint={root / folders.NAME / '0'}" in refused, what
    else:
        assert state is not None, what
        helpers.assert_bit_equal(jax.tree.leaves(state), jax.tree.leaves(small.state))


def test_the_damaged_leaf_is_named_and_the_checkpoint_before_offered(saved, tmp_path):
    small, root, _ = saved
    shutil.copytree(root, tmp_path / "run")
    checkpoints = tmp_path / "run" / folders.NAME
    shutil.copytree(checkpoints / "0", checkpoints / "7")
    data = max((checkpoints / "7" / "training").rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    zeros = max(re.finditer(rb"\0+", content), key=lambda zeros: len(zeros[0]))  # of a moment
    content[(zeros.start() + zeros.end()) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        goes_on(small, tmp_path / "run")
    first, offer = str(refused.value).splitlines()
    assert first.startswith(f"checkpoint={checkpoints / '7' / 'training'}: opt_state.0.")
    assert "Digest mismatch" in first
    assert offer == f"to go on from step 0 instead: mv {checkpoints / '7'} {checkpoints / '7'}.set-aside"
    (checkpoints / "7").rename(checkpoints / "7.set-aside")
    helpers.assert_bit_equal(jax.tree.leaves(goes_on(small, tmp_path / "run")), jax.tree.leaves(small.state))


OTHERS = {  # changes to config.yaml -> what the refusal says
    "format": (2, "has format 2, this version reads format 1"),
    "family": ("deepseek", r"config\.yaml: describes no model"),
    "training.version": (2, "has version 2 of training, this one reads 1"),
    "model.dim": (32, "is of another model: model.dim=32, here 16"),
    "model.rope.theta": (5.0, "is of another model: model.rope.theta=5.0, here 10000.0"),
}


@pytest.mark.parametrize("key", OTHERS)
def test_another_model_or_version_is_refused(saved, tmp_path, key):
    small, root, _ = saved
    shutil.copytree(root, tmp_path / "run")
    file, (value, problem) = tmp_path / "run" / folders.NAME / "0" / "config.yaml", OTHERS[key]
    fields = yaml.safe_load(file.read_text())
    *parents, last = key.split(".")
    node = fields
    for parent in parents:
        node = node[parent]
    node[last] = value
    file.write_text(yaml.safe_dump(fields))
    with pytest.raises(ConfigError, match=problem):
        goes_on(small, tmp_path / "run")
