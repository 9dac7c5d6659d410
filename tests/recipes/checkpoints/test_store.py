"""Checkpoints in an object store: what is not complete is none, and what is damaged is refused."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zoo
from recipes.checkpoints import folder as folders
from recipes.checkpoints.resume import find, resumed
from recipes.checkpoints.run import Checkpoints
from recipes.checkpoints.save import NotSaved
from recipes.data.config import DataConfig
from recipes.data.source import Corpus, load, with_tokenizer_of
from tests import helpers
from tests.object_store import Store, object_store
from tests.recipes.checkpoints.common import LLAMA, arrays, read
from tests.recipes.checkpoints.test_damage import Small
from zoo.checks import ConfigError
from zoo.paths import flat

ROOT = "s3://bucket/run"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch, object_store(patch) as store:
        yield store


@pytest.fixture(scope="module")
def saved(store) -> tuple[Small, Corpus, str, list[tuple[str, str]]]:
    """A run that saved after steps 4, 8 and 12 and kept two of them, its parts, and what was done to the store."""
    config, text = read(*LLAMA, "model.num_layers=1", f"train.checkpoint_dir={ROOT}")
    small, corpus = Small(config), load(config.data, config.model.vocab_size)
    checkpoints = Checkpoints(config, text, corpus, before=lambda: store.changes.append(("before", "")))
    checkpoints.begin(resumes=False)
    for step in (4, 8, 12):
        checkpoints.save(after(small, step), step)
    checkpoints.wait()
    return small, corpus, text, list(store.changes)


@pytest.fixture(autouse=True)
def as_before(store, saved) -> Iterator[None]:
    """Every test finds the store as the run left it."""
    before = dict(store.objects)
    yield
    store.objects, store.closed = before, False


def after(small: Small, step: int) -> Any:
    return dataclasses.replace(small.state, step=jnp.int32(step))


def goes_on(small: Small, **train: Any) -> Any:
    found = find(dataclasses.replace(small.config, train=dataclasses.replace(small.config.train, **train)))
    return None if found is None else resumed(found, small)  # type: ignore[arg-type]


def same(actual: Any, expected: Any) -> None:
    helpers.assert_bit_equal(jax.tree.leaves(actual), jax.tree.leaves(expected))


def test_what_was_saved_comes_back_and_the_old_ones_go(store, saved):
    small, *_ = saved
    assert folders.steps(folders.root(small.config)) == [8, 12]
    assert store.below("run/4") == []
    same(goes_on(small), after(small, 12))
    held = arrays(small.state)
    for path, leaf in flat(zoo.load(f"{ROOT}/12")).items():
        helpers.assert_bit_equal(leaf, held["weights", path])


def test_completion_is_written_last_after_the_log_and_removed_first(saved):
    *_, changes = saved
    for step in (4, 8, 12):
        written = [change for change in changes if change[0] != "DELETE" and change[1].startswith((f"run/{step}/", ""))]
        last = written.index(("PUT", f"run/{step}/config.yaml"))
        assert written[last - 1] == ("before", "")
        assert not [name for what, name in written[last + 1 :] if name.startswith(f"run/{step}/")]
    complete = changes.index(("PUT", "run/4/config.yaml"))
    removed = [name for what, name in changes[complete:] if what == "DELETE" and name.startswith("run/4/")]
    assert removed[0] == "run/4/config.yaml"
    assert len(removed) > 5


def test_a_half_written_or_half_removed_one_is_none_and_is_cleared_away(store, saved):
    small, corpus, text, _ = saved
    del store.objects["run/12/config.yaml"]
    store.objects["run/16/weights/state/manifest.ocdbt"] = b"begun"
    others = ("run/notes.txt", "run/notes/7", "run/2024/table", "run/2025/weights/x", "run/2025/table")
    store.objects |= dict.fromkeys(others, b"somebody's own")
    same(goes_on(small), after(small, 8))
    checkpoints = Checkpoints(small.config, text, corpus)
    checkpoints.begin(resumes=True)
    assert store.below("run/12") == store.below("run/16") == []
    checkpoints.save(after(small, 12), 12)
    checkpoints.wait()
    same(goes_on(small), after(small, 12))
    checkpoints.save(after(small, 2024), 2024)
    with pytest.raises(NotSaved, match="run/2024: holds what is of no checkpoint"):
        checkpoints.wait()
    assert all(store.objects[name] == b"somebody's own" for name in others)


def test_a_damaged_object_is_refused_or_harmless(store, saved):
    small, *_ = saved
    refused = []
    telling = ("/d/", "/manifest.ocdbt", "/config.yaml")
    held = [name for name in store.below("run/12/") if any(word in name for word in telling)]
    for number, name in enumerate(held):
        content = store.objects[name]
        changed = bytearray(content)
        changed[len(changed) * number // len(held)] ^= 1 << number
        store.objects[name] = bytes(changed)
        said = ""
        try:
            same(goes_on(small), after(small, 12))
        except ConfigError as error:
            said = str(error)
        store.objects[name] = content
        if said:
            assert f"checkpoint={ROOT}/12" in said
            assert said.endswith(
                f"to go on from step 8 instead: delete {ROOT}/12/config.yaml; the rest of it goes at the next start"
            )
            refused.append(name)
    assert len(held) == 5
    assert {name for name in held if not name.endswith("config.yaml")} <= set(refused)


def test_a_store_that_refuses_ends_the_save_and_keeps_what_is_complete(store, saved):
    small, corpus, text, _ = saved
    before = dict(store.objects)
    checkpoints = Checkpoints(small.config, text, corpus, before=lambda: setattr(store, "closed", True))
    checkpoints.save(after(small, 16), 16)
    with pytest.raises(NotSaved, match=f"step 16 cannot be written: {ROOT}/16: PERMISSION_DENIED: AccessDenied"):
        checkpoints.wait()
    assert {name: store.objects[name] for name in before} == before
    assert folders.steps(folders.root(small.config)) == [8, 12]


def test_checkpoints_in_a_store_cannot_be_set_aside(saved):
    small, *_ = saved
    said = rf"train\.resume=never: {ROOT} holds checkpoints up to step 12, .*\nchoose another train\.checkpoint_dir"
    with pytest.raises(ConfigError, match=said):
        goes_on(small, resume="never")
    assert goes_on(small, resume="never", checkpoint_dir=f"{ROOT}/another") is None


def test_the_tokenizer_beside_weights_is_fetched(store, tmp_path):
    store.objects["run/12/huggingface/tokenizer.json"] = b"{}"
    config = DataConfig(source="stdlib", cache=str(tmp_path / "cache"))
    fetched = with_tokenizer_of(f"{ROOT}/12", config).tokenizer
    assert fetched is not None
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [fetched.rpartition("/")[2]]
    assert Path(fetched).read_text() == "{}"
    assert with_tokenizer_of(f"{ROOT}/8", config) == config
