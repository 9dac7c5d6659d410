"""Models built, abstract and counted."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from layers import split_buffers
from tests import helpers

STD = 0.3
TINY = {
    "debug_llama": {
        "dim": 8,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "mlp_dim": 5,
        "tied_embeddings": False,
        "init_std": STD,
    },
    "debug_deepseek": {
        "dim": 8,
        "num_layers": 2,
        "num_heads": 2,
        "query_rank": 5,
        "mlp_dim": 5,
        "expert_dim": 3,
        "init_std": STD,
    },
}


@functools.cache
def build(name: str, seed: int = 0, **more):
    return zoo.build(name, key=jax.random.key(seed), **{**TINY[name], **more})


def test_parameter_counts_of_the_comparison_models():
    assert zoo.count_parameters("bench_llama") == 3_688_704
    assert zoo.count_parameters("bench_deepseek") == 3_684_992 + 16
    buffers = split_buffers(zoo.abstract("bench_deepseek"))[1]
    assert [leaf.shape for leaf in jax.tree.leaves(buffers)] == [(8,), (8,)]


PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama_2b": 1_953_108_480,  # not published: for one device of 80 GB
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3_671b": 671_026_419_200,
    "kimi_k2": 1_026_408_232_448,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items(), ids=PUBLISHED)
def test_parameter_counts_of_the_published_models(name: str, count: int):
    """As on their model cards, embeddings and routing biases included."""
    assert zoo.count_parameters(name) == count


def test_every_model_is_published_or_ours():
    assert {name for name in zoo.names() if not name.startswith(("debug_", "bench_"))} == set(PUBLISHED)


def test_multi_token_prediction_adds_a_layer_and_what_joins_it():
    d, added = 7168, zoo.count_parameters("deepseek_v3_671b", num_mtp_layers=1) - PUBLISHED["deepseek_v3_671b"]
    layer = zoo.count_parameters("deepseek_v3_671b", num_layers=5) - zoo.count_parameters(
        "deepseek_v3_671b", num_layers=4
    )
    assert added == layer + 2 * d * d + 3 * d == 11_610_068_224


@pytest.mark.parametrize("name", TINY)
def test_the_abstract_model_has_the_structure_shapes_and_dtypes_of_the_built_one(name):
    abstract, model = zoo.abstract(name, **TINY[name]), build(name)
    assert jax.tree.structure(abstract) == jax.tree.structure(model)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(abstract)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model)
    ]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model)} == {"float32"}
    assert zoo.count_parameters(name, **TINY[name]) == sum(leaf.size for leaf in jax.tree.leaves(model))
    assert zoo.tags(abstract) == zoo.tags(model)


@pytest.mark.parametrize("name", TINY)
def test_values_depend_on_the_key_and_the_layer_only(name):
    model = build(name)
    deeper = build(name, num_layers=3)
    shared = len(model.layers.blocks)
    assert shared < len(deeper.layers.blocks) == 3
    first = eqx.tree_at(lambda m: m.layers.blocks, deeper, deeper.layers.blocks[:shared])
    helpers.assert_bit_equal(first, model)
    for a, b in zip(random_leaves(model), random_leaves(build(name, seed=1)), strict=True):
        assert (a != b).all()


def test_building_under_an_outer_jit_gives_the_same_values():
    """To the bit with the options that `build` itself compiles with; others may round the last bit otherwise."""
    inside = helpers.jit(lambda key: zoo.build("debug_llama", key=key, **TINY["debug_llama"]))(jax.random.key(0))
    helpers.assert_bit_equal(inside, build("debug_llama"))


def random_leaves(model) -> list[np.ndarray]:
    """The matrices: vectors start at one (norms) or zero (biases)."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model) if leaf.ndim > 1]


@pytest.mark.parametrize("name", TINY)
def test_no_two_leaves_start_alike(name):
    leaves = random_leaves(build(name))
    firsts = [leaf.ravel()[:8].tolist() for leaf in leaves]
    assert not any(set(a) & set(b) for a, b in itertools.combinations(firsts, 2))
    for leaf in leaves:
        assert len(np.unique(leaf)) > 0.99 * leaf.size


@pytest.mark.parametrize("name", TINY)
def test_vectors_start_as_ones_and_biases_as_zeros(name):
    parameters, buffers = split_buffers(build(name))
    assert all((np.asarray(leaf) == 1).all() for leaf in jax.tree.leaves(parameters) if leaf.ndim == 1)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(buffers))


@pytest.mark.parametrize("name", TINY)
def test_every_matrix_has_the_deviation_of_the_configuration(name):
    # The smallest has 15 entries, whose deviation is known to 18% (one sigma).
    for leaf in random_leaves(build(name)):
        assert 0.4 * STD < np.std(leaf) < 2 * STD


def test_dense_layers_come_first():
    kinds = [type(block).__name__ for block in zoo.abstract("debug_deepseek", num_dense_layers=3).layers.blocks]
    assert kinds == ["DenseBlock"] * 3 + ["MoEBlock"]


def test_shared_experts_act_as_one_of_their_joint_size():
    def moe(count):
        return zoo.abstract("debug_deepseek", num_shared_experts=count).layers.blocks[-1].moe

    assert moe(0).shared is None
    assert moe(3).shared.gate_proj.weight.shape == (128, 3 * 128)
    assert {tag.name for tag in zoo.tags(moe(1))} >= {"shared_gate", "moe_gate"}


def test_tied_embeddings_are_one_leaf_with_both_gradients():
    tied = helpers.drawn(lambda: zoo.abstract("debug_llama", **{**TINY["debug_llama"], "tied_embeddings": True}))
    assert tied.head is None
    assert sum(256 in leaf.shape for leaf in jax.tree.leaves(tied)) == 1
    untied = zoo.abstract("debug_llama", **TINY["debug_llama"])
    assert sum(256 in leaf.shape for leaf in jax.tree.leaves(untied)) == 2

    tokens = jnp.asarray(np.array([[3, 4, 5]], np.int32))

    @helpers.jit
    def gradients(model):
        loss = lambda model, unembed: jnp.sum(jnp.sin(model.forward(tokens).hidden @ unembed(model)))  # noqa: E731
        both = eqx.filter_grad(loss)(model, lambda m: m.unembedding)
        frozen = eqx.filter_grad(loss)(model, lambda m: jax.lax.stop_gradient(m.unembedding))
        return both.embedding.weight, frozen.embedding.weight

    both, through_tokens = helpers.host(gradients(tied))
    assert np.flatnonzero(np.abs(through_tokens).max(axis=1)).tolist() == [3, 4, 5]
    assert (np.abs(both).max(axis=1) > 0).all()
    assert (both[[3, 4, 5]] != through_tokens[[3, 4, 5]]).any()
