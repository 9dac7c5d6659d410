"""Runs of equal layers: exact inverses, one scan a run, edits on the canonical model."""

from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from layers import Stack
from recipes import Placement, place, resolve, unplace
from recipes.placement.segments import Run, place_stack, replace_places, runs_of, structure
from recipes.verify.equivalence import SAMPLES
from tests import helpers
from tests.recipes.common import BEARTYPE_DRAWS, abstract, model, savable_once
from zoo.llama.config import LlamaConfig
from zoo.models import abstract as make_abstract

pytestmark = pytest.mark.usefixtures(savable_once.__name__)

DEEP = LlamaConfig(vocab_size=11, dim=4, num_layers=32, num_heads=1, num_kv_heads=1, head_dim=4, mlp_dim=4)
LONE = Placement(layers={"6+13+19+25+31": {"mlp_up": "host"}})
SPLIT = Placement(layers={"1": {"attn_query": "host"}})
GROUPED = Placement(layers={"0+2": {"attn_query": "host"}, "1+3": {"attn_value": "device"}}, group=2)


def runs(placed: Any) -> list[Run]:
    return list(placed.layers.runs)


def arrays(tree: Any) -> Any:
    """A copy of the tree in jax arrays, which `place` may consume."""
    return jax.tree.map(jnp.asarray, tree)


@pytest.mark.parametrize("placement", [Placement(), Placement(default="host"), SPLIT], ids=["remat", "host", "split"])
@pytest.mark.parametrize("name", ["llama_one_layer", "llama_tied", "deepseek_nine_experts", "deepseek_v2"])
def test_unplace_is_the_exact_inverse(name: str, placement: Placement):
    if placement is SPLIT and len(model(name).layers.blocks) == 1:
        placement = Placement(layers={"last": {"attn_query": "host"}})
    helpers.assert_bit_equal(unplace(place(arrays(model(name)), placement)), model(name))


def test_a_grouped_model_computes_and_reports_what_the_canonical_one_does():
    """Two steps of two layers; the counts come in the order of the layers."""
    canonical = model("deepseek_all_moe", num_layers=4)
    placed = place(canonical, GROUPED)
    assert [(run.length, len(run.blocks)) for run in runs(placed)] == [(2, 2)]
    helpers.assert_bit_equal(unplace(placed), canonical)
    tokens = jnp.asarray([[1, 2, 3, 4, 5]], jnp.int32)
    call = helpers.jit(lambda model: model.forward(tokens))
    actual, expected = call(placed), call(canonical)
    helpers.assert_close(actual, expected, helpers.FLOAT32_MODEL)
    counts = np.asarray(actual.aux.moe.counts)
    np.testing.assert_array_equal(counts, expected.aux.moe.counts)
    assert len({tuple(row) for row in counts.tolist()}) > 1


def test_place_after_unplace_is_the_identity():
    placed = helpers.host(place(arrays(model("deepseek_v2")), SPLIT))
    again = place(arrays(unplace(placed)), SPLIT)
    helpers.assert_bit_equal(again, placed)
    assert [run.places for run in runs(again)] == [run.places for run in runs(placed)]


def test_abstract_and_real_models_are_placed_alike():
    placed, abstractly = place(arrays(model("deepseek_v2")), SPLIT), place(abstract("deepseek_v2"), SPLIT)
    assert jax.tree.structure(placed) == jax.tree.structure(abstractly)
    assert [x.shape for x in jax.tree.leaves(placed)] == [x.shape for x in jax.tree.leaves(abstractly)]


def test_place_consumes_the_blocks_leaf_by_leaf():
    canonical = arrays(model("llama_tied"))
    placed = place(canonical, Placement())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(canonical.layers))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(placed))


def test_runs_number_their_layers_and_know_their_places():
    found = runs(place(make_abstract(DEEP), LONE))
    assert [(run.first, run.length) for run in found] == [
        (0, 6), (6, 1), (7, 6), (13, 1), (14, 5), (19, 1), (20, 5), (25, 1), (26, 5), (31, 1),
    ]  # fmt: skip
    assert [dict(run.places[0])["mlp_up"] for run in found] == ["remat", "host"] * 5


@BEARTYPE_DRAWS
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.data())
def test_runs_are_maximal_and_lose_no_layer(rows: list[str], data: st.DataObject):
    widths = data.draw(st.lists(st.sampled_from([1, 2]), min_size=len(rows), max_size=len(rows)))
    blocks: Any = [jnp.zeros(width) for width in widths]
    found = runs_of(blocks, rows)
    assert [layer for run, _ in found for layer in run] == list(range(len(rows)))
    kinds = [{(rows[layer], widths[layer]) for layer in run} for run, _ in found]
    assert all(period == 1 for _, period in found)
    assert all(len(kind) == 1 for kind in kinds)
    assert all(a != b for a, b in pairwise(kinds))


# rows, group -> the runs: layers of each, and how many a step takes
PATTERNS = {
    "alternating": ("abababab", 2, [(8, 2)]),
    "not_allowed": ("abab", 1, [(1, 1)] * 4),
    "unfinished": ("ababa", 2, [(4, 2), (1, 1)]),
    "equal_rows_first": ("aaabababb", 2, [(3, 1), (4, 2), (2, 1)]),
    "no_repetition": ("abc", 3, [(1, 1)] * 3),
    "three": ("aabaabaab", 3, [(9, 3)]),
    "shorter_if_as_good": ("aaaa", 4, [(4, 1)]),
}


@pytest.mark.parametrize(("rows", "group", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_repeating_patterns_are_grouped(rows: str, group: int, expected: list[tuple[int, int]]):
    blocks: Any = [jnp.zeros(1)] * len(rows)
    found = runs_of(blocks, rows, group)
    assert [(len(layers), period) for layers, period in found] == expected
    assert [layer for layers, _ in found for layer in layers] == list(range(len(rows)))


def test_a_pattern_takes_blocks_of_one_structure_only():
    blocks: Any = [jnp.zeros(width) for width in (1, 2, 1, 2)]
    assert len(runs_of(blocks, "abab", 2)) == 4


def test_layers_of_other_fields_shapes_or_dtypes_never_share_a_run():
    block = abstract("llama_tied").layers.blocks[0]
    others = {
        "static": make_abstract(SAMPLES["llama_tied"].config, norm_eps=0.5).layers.blocks[0],
        "shape": eqx.tree_at(lambda b: b.mlp_norm.weight, block, jax.ShapeDtypeStruct((9,), jnp.float32)),
        "dtype": eqx.tree_at(lambda b: b.mlp_norm.weight, block, jax.ShapeDtypeStruct((8,), jnp.bfloat16)),
    }
    for other in others.values():
        assert structure(other) != structure(block)
        assert len(place_stack(Stack((block, other, other)), [({}, ())] * 3).runs) == 2
    assert len(place_stack(Stack((block, block)), [({}, ())] * 2).runs) == 1


def scans(program: Any) -> int:
    return sum(equation.primitive.name == "scan" for equation in helpers.equations(program.jaxpr))


@pytest.mark.parametrize("placement", [Placement(), Placement(default="host"), LONE], ids=["remat", "host", "lone"])
def test_there_are_as_many_scans_as_runs_whatever_the_number_of_layers(placement: Placement):
    canonical = make_abstract(DEEP)
    table = resolve(placement, canonical)
    placed = place(canonical, placement, table=table)
    tokens = jax.ShapeDtypeStruct((1, 5), jnp.int32)
    forward = jax.make_jaxpr(lambda model, tokens: model(tokens))(placed, tokens)
    assert table.num_segments == len(runs(placed)) == {0: 1, 5: 10}[len(placement.layers) * 5]
    assert scans(forward) == table.num_segments
    gradient = jax.make_jaxpr(jax.grad(lambda model, tokens: jnp.sum(model(tokens))))(placed, tokens)
    assert scans(gradient) == 2 * table.num_segments


def test_edits_of_the_canonical_model_survive():
    canonical = model("deepseek_nine_experts", num_layers=3)

    def where(model: Any) -> Any:
        return model.layers.blocks[2].attention.kv_norm.weight

    edited = eqx.tree_at(where, canonical, np.full_like(where(canonical), 7.0))
    placed = place(edited, SPLIT)
    run = next(run for run in runs(placed) if 2 in run.layers)
    np.testing.assert_array_equal(np.asarray(run.blocks[0].attention.kv_norm.weight[2 - run.first]), 7.0)
    helpers.assert_bit_equal(unplace(placed), edited)


def test_canonical_paths_name_the_same_layer_under_any_placement():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(model("llama_tied"))]
    for placement in (Placement(), SPLIT):
        again = unplace(place(model("llama_tied"), placement))
        assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(again)] == paths


def test_the_twin_has_the_segments_of_the_original_and_other_places():
    placed = place(make_abstract(DEEP), LONE)
    twin = replace_places(placed, lambda place: "device" if place == "host" else place)
    assert [(run.first, run.length) for run in runs(twin)] == [(run.first, run.length) for run in runs(placed)]
    assert all(dict(run.places[0])["mlp_up"] == ("device", "remat")[run.length > 1] for run in runs(twin))
    assert all(dict(run.places[0])["mlp_gate"] == "remat" for run in runs(twin))
    assert jax.tree.leaves(twin) == jax.tree.leaves(placed)


def test_a_placed_model_is_called_like_the_model():
    tokens, positions = np.array([[1, 2, 3, 4, 5]], np.int32), np.array([[0, 1, 2, 0, 1]], np.int32)
    canonical = model("deepseek_v2")
    call = helpers.jit(lambda model, *args: (model(*args), model.forward(*args)))
    expected = call(canonical, tokens, positions, np.array([[0, 0, 0, 1, 1]], np.int32))
    actual = call(place(canonical, SPLIT), tokens, positions, np.array([[0, 0, 0, 1, 1]], np.int32))
    helpers.assert_close(actual, expected, helpers.FLOAT32_MODEL)
    assert actual[1].aux.moe.counts.tolist() == expected[1].aux.moe.counts.tolist()
