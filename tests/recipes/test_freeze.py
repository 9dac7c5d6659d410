"""Frozen parameters keep their bits, and have neither gradients nor moments nor masters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recipes
import zoo
from recipes import OptimizerConfig, Placement, canonical_mask, frozen, make_optimizer, make_train_step, place, resolve
from tests import helpers
from tests.recipes.common import abstract, batch, lenient, model
from tests.zoo.weights_common import LLAMA, model as weights
from zoo.paths import flat

NAME = "deepseek_nine_experts"
PATTERNS = ("embedding", "layers.blocks.[1-2]", "*.kv_up")
ADAM = OptimizerConfig(learning_rate=3e-2, schedule="constant")


def trained(original: Any, patterns: tuple[str, ...], dtype: Any, tokens: Any, placement: Placement) -> Any:
    """The state after two steps."""
    mask, optimizer = frozen(patterns), lenient(make_optimizer(ADAM, 2))
    table = resolve(placement, original, apart=mask(original))
    placed = jax.tree.map(jnp.asarray, place(original, placement, table=table))
    state = recipes.init_state(placed, optimizer, dtype, frozen=canonical_mask(mask))
    step = make_train_step(optimizer, router_bias_rate=0.125, frozen=canonical_mask(mask))
    for _ in range(2):
        state, _ = step(state, tokens)
    return state


def test_two_steps_change_what_is_not_frozen_and_nothing_else():
    dtype, original = "bfloat16", model(NAME, num_layers=3)
    before = flat(helpers.cast(original, dtype))
    placement = Placement(activations={"attn_query": "host"})
    state = trained(original, PATTERNS, jnp.dtype(dtype), batch(NAME), placement)
    after = flat(recipes.unplace(state.params))
    mask = flat(frozen(PATTERNS)(original))
    assert 0.3 < np.mean(list(mask.values())) < 0.9
    for path, fixed in mask.items():
        new = np.asarray(after[path])
        if "bias" in path:  # buffers stay float32 whatever the dtype
            assert (new == np.asarray(flat(original)[path])).all() == fixed, path
        else:
            assert (new == np.asarray(before[path])).all() == fixed, path
    kept = [leaf for leaf in jax.tree.leaves(recipes.unplace(state.opt_state)) if getattr(leaf, "ndim", 0)]
    trainable = [path for path, fixed in mask.items() if not fixed and "bias" not in path]
    assert len(kept) == 2 * len(trainable)
    assert len(jax.tree.leaves(recipes.unplace(state.master))) == len(trainable)


def test_a_fine_tune_of_two_steps_from_an_imported_checkpoint_leaves_the_frozen_half_bit_equal(tmp_path):
    zoo.export(weights(LLAMA), tmp_path / "hf")
    from zoo import checkpoint
    from zoo.convert import convert, open_weights

    convert(open_weights(tmp_path / "hf"), checkpoint.write, tmp_path / "own")
    original = zoo.load(tmp_path / "own", jnp.float32)
    before = {path: np.asarray(leaf) for path, leaf in flat(original).items()}
    half = tuple(path for i, path in enumerate(before) if i % 2)
    rng = np.random.default_rng(0)
    tokens = {"tokens": rng.integers(0, LLAMA.vocab_size, (2, 6)).astype(np.int32)}
    tokens["loss_mask"] = np.asarray([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]], np.int32)
    after = flat(recipes.unplace(trained(original, half, jnp.float32, tokens, Placement()).params))
    same = {path for path in before if (np.asarray(after[path]) == before[path]).all()}
    assert same == set(half)


def test_patterns_match_a_path_or_what_it_stands_below():
    mask = flat(frozen(["layers.blocks.0", "*.kv_up.weight"])(abstract(NAME)))
    for path, fixed in mask.items():
        assert fixed == (path.startswith("layers.blocks.0.") or path.endswith(".kv_up.weight")), path
    with pytest.raises(zoo.ConfigError, match=r"layers.block.0: matches no parameter"):
        frozen(["layers.block.0"])(abstract(NAME))
    with pytest.raises(zoo.ConfigError, match="leaves nothing to train"):
        frozen(["layers", "embedding", "norm", "head"])(abstract(NAME))
