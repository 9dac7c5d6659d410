"""Masks and labels on canonical paths give the same updates under any placement."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from recipes import Placement, canonical_mask, place, resolve, unplace
from tests import helpers
from tests.recipes.common import abstract, model
from zoo.checks import ConfigError

NAME = "llama_tied"
PLACEMENTS = {
    "remat": Placement(),
    "split": Placement(layers={"1": {"attn_query": "host"}}),
    "grouped": Placement(layers={"0+2": {"attn_query": "host"}}, group=2),
}


def by_path(word: str) -> Any:
    """A mask that is true where the canonical path contains a word."""
    return lambda params: jax.tree.map_with_path(lambda path, _: word in jax.tree_util.keystr(path), params)


def updated(params: Any, mask: Any) -> Any:
    """The updates of a chain that uses the mask, a function, twice: for decay, and to freeze."""
    optimizer = optax.chain(optax.add_decayed_weights(0.5, mask), optax.masked(optax.set_to_zero(), mask))
    gradients = jax.tree.map(lambda leaf: np.sin(np.asarray(leaf)), params)
    return optimizer.update(gradients, optimizer.init(params), params)[0]


@pytest.mark.parametrize("word", ["embedding", "norm", "up_proj", "nothing"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_mask_by_canonical_path_gives_the_updates_of_the_canonical_model(placement: Placement, word: str):
    expected = updated(model(NAME), by_path(word))
    placed = place(model(NAME), placement)
    for mask in (by_path(word), by_path(word)(model(NAME))):
        helpers.assert_bit_equal(unplace(updated(placed, canonical_mask(mask))), expected)
    zeros = [not np.asarray(leaf).any() for leaf in jax.tree.leaves(expected)]
    assert zeros == jax.tree.leaves(by_path(word)(model(NAME)))


@pytest.mark.parametrize("placement", [PLACEMENTS["remat"], PLACEMENTS["split"]], ids=["remat", "split"])
def test_a_mask_that_tells_layers_apart_keeps_them_apart(placement: Placement):
    mask = by_path("blocks[1].mlp")(model(NAME))
    expected = updated(model(NAME), lambda _: mask)  # itself it would be called: a model's structure is callable
    table = resolve(placement, abstract(NAME), apart=mask)
    assert table.num_segments == 3
    for given in (None, table):
        placed = place(model(NAME), placement, table=given, apart=mask if given is None else None)
        assert [list(run.layers) for run in placed.layers.runs] == [[0], [1], [2, 3]]
        helpers.assert_bit_equal(unplace(updated(placed, canonical_mask(mask))), expected)


def test_labels_choose_between_optimizers():
    labels = jax.tree.map(lambda frozen: "frozen" if frozen else "trained", by_path("embedding")(model(NAME)))
    placed = place(model(NAME), PLACEMENTS["split"])
    optimizer = optax.partition({"frozen": optax.set_to_zero(), "trained": optax.sgd(1.0)}, canonical_mask(labels))
    updates: Any = optimizer.update(placed, optimizer.init(placed), placed)[0]
    assert not np.asarray(updates.embedding.weight).any()
    helpers.assert_bit_equal(unplace(updates).layers, jax.tree.map(np.negative, model(NAME).layers))


def test_layers_of_one_segment_need_one_label():
    mask = by_path("blocks[2]")(model(NAME))
    with pytest.raises(ConfigError, match=r"(?s)layers 0, 1, 2, 3 share an array and need one label.*apart=mask"):
        canonical_mask(mask)(place(abstract(NAME), Placement()))


def test_a_mask_of_another_model_is_refused():
    mask = by_path("norm")(abstract("llama_five_layers"))
    with pytest.raises(ValueError, match="4 layers, not 5"):
        resolve(Placement(), abstract(NAME), apart=mask)


def test_a_table_of_something_else_is_refused():
    table, mask = resolve(Placement(), abstract(NAME)), by_path("blocks[1]")(model(NAME))
    for placement, apart in ((Placement(default="host"), None), (Placement(), mask)):
        with pytest.raises(ValueError, match="the table is that of another placement"):
            place(abstract(NAME), placement, table=table, apart=apart)
