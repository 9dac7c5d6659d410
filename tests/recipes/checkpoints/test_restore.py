"""A restored state is the saved one to the bit, wherever it was saved and wherever it is wanted."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest

import recipes
import zoo
from recipes.checkpoints.restore import restore
from recipes.checkpoints.save import Saver
from recipes.step.state import TrainState
from tests import helpers
from tests.recipes.checkpoints.common import DEEPSEEK, LLAMA, arrays, copied, setup, steps
from zoo.checkpoint import write_config
from zoo.checks import ConfigError
from zoo.convert import open_weights
from zoo.paths import flat


def save(root: Path, state: Any, step: int, config: Any = None) -> Path:
    """The complete checkpoint."""
    saver = Saver(root, 3, 0, lambda folder, _: config and write_config(folder, config.model))
    folder = saver.save(state, step)
    saver.wait()
    assert isinstance(folder, Path)
    return folder


def same(actual: Any, expected: Any) -> None:
    helpers.assert_bit_equal(jax.tree.leaves(actual), jax.tree.leaves(expected))


def test_saved_on_8_devices_with_host_placement_restored_on_4_with_remat(tmp_path):
    eight = setup(*LLAMA, "mesh.fsdp=4", "mesh.tensor=2", "placement=host")
    state, _ = steps(eight, eight.drawn_state(), 1)
    folder, before = save(tmp_path, state, 1), arrays(state)
    layers = "placement.layers={0:{mlp_up:device}}"  # two segments instead of one
    four = setup(*LLAMA, "mesh.fsdp=4", "placement=remat", layers, devices=4)
    restored = restore(folder, four.abstract_state())
    helpers.assert_bit_equal(arrays(restored), before)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(four.abstract_state()), strict=True):
        assert leaf.sharding == wanted.sharding
    (_, there), (_, here) = steps(four, restored, 2), steps(eight, state, 2)
    np.testing.assert_allclose(there, here, rtol=helpers.FLOAT32)


def moments(state: Any) -> Any:
    return [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]


NARROW = [*DEEPSEEK, "train.dtype=bfloat16", "train.freeze=[embedding,layers.blocks.1.attention]", "placement=device"]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> tuple[Any, Path, Any]:
    """A run in bfloat16 with frozen parameters, its checkpoint after two steps, and the state after three."""
    run = setup(*NARROW)
    state, _ = steps(run, copied(run.drawn_state()), 2)
    folder = save(tmp_path_factory.mktemp("narrow"), state, 2, run.config)
    return run, folder, steps(run, state, 1)[0]


def test_the_step_after_restoring_is_the_one_of_never_having_stopped(narrow):
    run, folder, expected = narrow
    state, _ = steps(run, restore(folder, run.abstract_state()), 1)
    helpers.assert_bit_equal(jax.tree.leaves(state), jax.tree.leaves(expected))
    assert int(state.step) == 3
    assert int(state.cursor) == 24


def test_its_weights_are_a_checkpoint_like_any_other_and_begin_a_run_anew(narrow):
    run, folder, _ = narrow
    state = restore(folder, run.abstract_state())
    params, masters = flat(recipes.unplace(state.params)), flat(recipes.unplace(state.master))
    for path, leaf in flat(zoo.load(folder)).items():
        helpers.assert_bit_equal(leaf, masters.get(path, params[path]))
    anew = run.loaded_state(open_weights(folder))
    same(dataclasses.replace(anew, opt_state=state.opt_state, step=state.step, cursor=state.cursor), state)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((anew.step, anew.cursor, moments(anew))))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(moments(state)))


def test_orbax_reads_it(narrow):
    run, folder, _ = narrow
    held = arrays(restore(folder, run.abstract_state()))
    for name in ("weights", "training"):
        found = flat(ocp.load(str(folder / name)))
        assert found.keys() == {path for where, path in held if where == name}
        helpers.assert_bit_equal(found, {path: held[name, path] for path in found})


def test_restored_to_pinned_host_memory_and_saved_from_there(narrow, tmp_path):
    run, folder, _ = narrow

    def pinned(leaf: Any) -> Any:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    wanted = run.abstract_state()
    state = restore(folder, jax.tree.map(pinned, wanted))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)} == {"pinned_host"}
    again = restore(save(tmp_path, state, 2), wanted)
    same(again, restore(folder, wanted))


def test_any_state_of_optax_with_random_keys(tmp_path):
    params = {"a": jnp.ones((3, 2)), "b": {"c": jnp.zeros(())}}
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adafactor(1e-2))
    state = TrainState(jnp.int32(1), jnp.int32(8), params, None, noisy.init(params))
    restored = restore(save(tmp_path, state, 1), jax.eval_shape(lambda: state))
    helpers.assert_bit_equal(*(jax.tree.leaves(jax.tree.map(plain, each)) for each in (restored, state)))
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_what_does_not_fit_is_named(narrow):
    _, folder, _ = narrow
    other = {
        "model.mlp_dim=24": r"layers\.blocks\.0\.mlp.*has shape \[16, 16\], this run needs \[16, 24\]",
        "optimizer.clip_norm=null": r"lacks opt_state\.0\.",
        "optimizer.moment_dtype=bfloat16": r"mu.* is of float32, this run needs bfloat16\ntrain.allow_cast",
        "train.freeze=[embedding]": r"layers\.blocks\.1\.attention.* is of bfloat16, this run needs float32",
        "train.freeze=[embedding,layers.blocks.1]": r"norm.* is of float32, this run needs bfloat16",
    }
    for override, problem in other.items():
        with pytest.raises(ConfigError, match=problem):
            restore(folder, setup(*NARROW, override).abstract_state())


def test_dtypes_are_converted_when_asked(narrow):
    run, folder, _ = narrow
    state = restore(folder, setup(*NARROW, "optimizer.moment_dtype=bfloat16").abstract_state(), allow_cast=True)
    before = arrays(restore(folder, run.abstract_state()))
    for name, leaf in arrays(state).items():
        helpers.assert_bit_equal(leaf, before[name].astype(leaf.dtype))
