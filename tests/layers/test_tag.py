"""Tags: full names, checks of shape and dtype, what a walk over a model finds."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int32, jaxtyped

from layers import MLA, Attention, DenseBlock, Experts, MoE, MoEBlock, Router, SwiGLU, Tag, name_tags, tag, tags
from layers.tag import fence
from tests import helpers

KEY = jax.random.key(0)
MLA_SIZES: dict[str, Any] = {"kv_rank": 4, "nope_dim": 3, "rope_dim": 2, "value_dim": 3}
ATTENTION = ["query", "key", "value", "context", "lse", "out"]
KV_LATENT = ["kv_latent", "kv_latent_normed"]
QUERY_LATENT = ["query_latent", "query_latent_normed"]


def moe(prefix: str = "moe", shared: str = "shared") -> MoE:
    return MoE(
        Router(4, 3, 2, prefix=prefix, key=KEY),
        Experts(4, 5, 3, prefix=prefix, key=KEY),
        SwiGLU(4, 5, prefix=shared, key=KEY),
    )


MODULES = {
    "attention": (lambda: Attention(4, 2, 1, 2, key=KEY), "attn", ATTENTION),
    "cross": (lambda: Attention(4, 2, 1, 2, prefix="cross", key=KEY), "cross", ATTENTION),
    "mla": (lambda: MLA(4, 2, query_rank=3, **MLA_SIZES, key=KEY), "attn", QUERY_LATENT + KV_LATENT + ATTENTION),
    "mla_lite": (lambda: MLA(4, 2, query_rank=None, **MLA_SIZES, key=KEY), "attn", KV_LATENT + ATTENTION),
    "mlp": (lambda: SwiGLU(4, 5, key=KEY), "mlp", ["gate", "up"]),
    "router": (lambda: Router(4, 3, 2, key=KEY), "moe", ["scores", "chosen"]),
    "experts": (lambda: Experts(4, 5, 3, key=KEY), "moe", ["plan", "dispatched", "gate", "up"]),
}


def names(module) -> list[str]:
    return [found.name for found in tags(module)]


@pytest.mark.parametrize(("make", "prefix", "fields"), MODULES.values(), ids=MODULES)
def test_a_tag_is_named_by_prefix_and_field(make, prefix, fields):
    assert names(eqx.filter_eval_shape(make)) == [f"{prefix}_{field}" for field in fields]


def test_two_instances_in_one_block_have_different_names():
    def two():
        return (
            DenseBlock(Attention(4, 2, 1, 2, key=KEY), SwiGLU(4, 5, key=KEY), 4),
            MoEBlock(Attention(4, 2, 1, 2, prefix="cross", key=KEY), moe(), 4, prefix="second"),
        )

    found = names(eqx.filter_eval_shape(two))
    assert len(found) == len(set(found)) == 2 * len(ATTENTION) + 2 + 8 + 2
    assert {"attn_query", "cross_query", "mlp_gate", "moe_gate", "shared_gate", "block_input", "second_input"} <= set(
        found
    )


def test_repeated_layers_count_once_in_order_of_appearance():
    layer = eqx.filter_eval_shape(moe)
    once = names(layer)
    assert once[:4] == ["moe_scores", "moe_chosen", "moe_plan", "moe_dispatched"]
    assert names([layer, layer, {"more": layer}]) == once


def test_options_of_the_tags():
    block = eqx.filter_eval_shape(lambda: MoEBlock(Attention(4, 2, 1, 2, prefix="cross", key=KEY), moe(), 4))
    found = {each.name: each for each in tags(block)}
    assert {name for name, each in found.items() if each.carried} == {"block_input"}
    assert {name for name, each in found.items() if each.discrete} == {"moe_chosen", "moe_plan"}
    assert {name: each.follows for name, each in found.items() if each.follows} == {"cross_lse": "cross_context"}


class Own(eqx.Module):
    """A researcher's module."""

    hidden: Tag[Float[Array, "batch seq dim"]] = tag()
    codes: Tag[Int32[Array, "batch seq"]] | None = tag(follows="hidden")

    def __init__(self, prefix: str):
        name_tags(self, prefix)

    def __call__(self, x):
        return self.hidden(x)


def test_an_own_module_has_tags_without_registration():
    hidden, codes = tags({"any": [Own("mine")]})
    assert (hidden.name, codes.name, codes.follows) == ("mine_hidden", "mine_codes", "mine_hidden")
    assert (hidden.discrete, codes.discrete) == (False, True)
    assert jax.tree.leaves(Own("mine")) == []
    assert Own("mine") == Own("mine")
    assert Own("mine") != Own("yours")


def test_marking_keeps_every_bit_and_shows_the_name():
    x = jnp.asarray(helpers.normal(0, 2, 3, 4))
    helpers.assert_bit_equal(Own("mine")(x), x)
    marks = [e.params["name"] for e in helpers.equations(jax.make_jaxpr(Own("mine"))(x)) if e.primitive.name == "name"]
    assert marks == ["mine_hidden"]


def test_a_fence_stands_after_the_mark_and_keeps_every_bit():
    x, fenced = jnp.asarray(helpers.normal(0, 2, 3, 4)), fence(Own("mine"))
    helpers.assert_bit_equal(fenced(x), x)
    primitives = [e.primitive.name for e in helpers.equations(jax.make_jaxpr(fenced)(x))]
    assert primitives == ["name", "optimization_barrier"]
    assert names(fenced) == names(Own("mine"))


@pytest.mark.parametrize(
    "x", [jnp.zeros((2, 3)), jnp.zeros((2, 3, 4, 1)), jnp.zeros((2, 3, 4), jnp.int32)], ids=["low", "high", "integer"]
)
def test_an_array_that_does_not_fit_is_a_type_error(x):
    with pytest.raises(TypeError, match="mine_hidden"):
        Own("mine")(x)


def test_the_dims_of_a_tag_are_those_of_the_calling_function():
    @jaxtyped(typechecker=None)
    def call(x, other):
        assert isinstance(x, Own("mine").hidden.array)
        return Own("mine").hidden(other)

    x = jnp.zeros((2, 3, 4))
    assert call(x, x).shape == x.shape
    with pytest.raises(TypeError, match=r"mine_hidden .*\[2, 5, 4\]"):
        call(x, jnp.zeros((2, 5, 4)))


def test_a_tag_field_needs_the_annotation_of_a_tag():
    class Wrong(eqx.Module):
        hidden: Float[Array, "batch seq"] = tag()

        def __init__(self):
            name_tags(self, "wrong")

    with pytest.raises(TypeError, match=r"hidden = tag\(\) needs an annotation"):
        Wrong()
