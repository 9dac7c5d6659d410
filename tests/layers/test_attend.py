"""Local attention: the oracle, the gradients, what it keeps and how much memory it takes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from layers.attend import local_attend
from layers.tag import Tag
from tests import helpers, reference

SCALE = 0.4
TAGS = {
    "context": Tag("attn_context", Float[Array, "batch seq heads value_dim"]),
    "lse": Tag("attn_lse", Float[Array, "batch heads seq"]),
}
# sequence, chunk, heads, key-value heads, query size, value size, segments
CASES = [
    (1, 512, 1, 1, 2, 2, False),
    (5, 4, 2, 2, 3, 3, True),
    (8, 4, 4, 1, 3, 6, False),
    (8, 512, 2, 1, 4, 3, True),
    (13, 4, 6, 2, 3, 5, True),
    (7, 1, 2, 1, 3, 3, True),
]
BATCH = 2


def arguments(case, seed: int = 0):
    length, _, heads, kv_heads, size, value_size, segmented = case
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size)]
    parts = [jnp.asarray(helpers.normal(seed + i, BATCH, length, *shape)) for i, shape in enumerate(shapes)]
    segments = np.random.default_rng(seed).integers(0, 2, (BATCH, length)).astype(np.int32)
    return (*parts, jnp.asarray(segments) if segmented else None)


def attend(*args, chunk: int = 512):
    return local_attend(*args, scale=SCALE, chunk=chunk, **TAGS)


def naive_attend(query, key, value, segments=None, *, scale=SCALE, context=None, lse=None):
    """The whole matrix of scores, for automatic differentiation; the tags are not applied."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    seen = jnp.tril(jnp.ones((query.shape[1],) * 2, bool))[None, None]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])[:, None]
    scores = scale * jnp.einsum("bqhd,bshd->bhqs", query, key)
    weights = jax.nn.softmax(jnp.where(jnp.broadcast_to(seen, scores.shape), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqs,bshv->bqhv", weights, value)


def with_gradients(functions, args, slope):
    """Each function's result, and its gradients in query, key and value for a slope of that, in one program."""

    @helpers.jit
    def run(query, key, value, segments, slope):
        def one(f):
            out, pull = jax.vjp(lambda q, k, v: f(q, k, v, segments), query, key, value)
            return out, pull(slope)

        return [one(f) for f in functions]

    return helpers.host(run(*args, slope))


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle_and_the_gradients_of_the_naive_form(case):
    length, chunk, heads, _, _, value_size, segmented = case
    args, slope = arguments(case), helpers.normal(9, BATCH, length, heads, value_size)
    (out, gradients), (_, expected) = with_gradients(
        [functools.partial(attend, chunk=chunk), naive_attend], args, slope
    )
    query, key, value = helpers.wide(args[:3])
    segments = np.asarray(args[3]) if segmented else [None] * BATCH
    oracle = [reference.attend(query[b], key[b], value[b], SCALE, segments[b])[0] for b in range(BATCH)]
    helpers.assert_close(out, np.stack(oracle), helpers.FLOAT32)
    helpers.assert_close(gradients, expected, helpers.FLOAT32)


def test_chunks_equal_the_dense_form():
    args, slope = arguments((13, 4, 4, 2, 3, 5, True)), helpers.normal(9, BATCH, 13, 4, 5)
    dense, threes, fours = with_gradients([functools.partial(attend, chunk=c) for c in (13, 3, 4)], args, slope)
    helpers.assert_close(threes, dense, helpers.FLOAT32)
    helpers.assert_close(fours, dense, helpers.FLOAT32)


@pytest.mark.parametrize("chunk", [4, 512])
def test_later_tokens_do_not_change_earlier_results(chunk):
    args = helpers.host(arguments((13, chunk, 2, 1, 3, 3, False))[:3])
    run = jax.jit(functools.partial(attend, chunk=chunk))
    before = np.asarray(run(*args))
    for token in (0, 4, 12):
        moved = np.where(np.arange(13) == token, np.float32(7), np.float32(0))[None, :, None, None]
        after = np.asarray(run(*(x + moved for x in args)))
        helpers.assert_bit_equal(after[:, :token], before[:, :token])
        assert (after[:, token] != before[:, token]).all()


@pytest.mark.parametrize("chunk", [4, 512])
def test_segments_neither_see_nor_pull_one_another(chunk):
    query, *keys_and_values = arguments((13, chunk, 2, 2, 3, 3, False))[:3]
    segments = jnp.asarray(np.array([[0] * 6 + [1] * 7, [3, 1] * 6 + [3]], np.int32))
    second = np.asarray(segments) == 1

    @helpers.jit
    def run(key, value):
        out, pull = jax.vjp(lambda k, v: attend(query, k, v, segments, chunk=chunk), key, value)
        return out, pull(jnp.where(jnp.broadcast_to(second[..., None, None], out.shape), 1.0, 0.0))

    key, value = helpers.host(keys_and_values)
    out, gradients = helpers.host(run(key, value))
    others = np.where(second, np.float32(0), np.float32(5))[..., None, None]
    moved, _ = helpers.host(run(key + others, value + others))
    helpers.assert_bit_equal(moved[second], out[second])
    for gradient in gradients:
        assert (gradient[~second] == 0).all()
        assert (gradient[second] != 0).any()


@pytest.mark.parametrize("chunk", [4, 512])
def test_scores_of_thousands_stay_finite(chunk):
    query, key, value = helpers.host(arguments((9, chunk, 2, 1, 4, 4, False))[:3])
    args, slope = (100 * query, 100 * key, value), helpers.normal(9, BATCH, 9, 2, 4)
    [actual] = with_gradients([functools.partial(attend, chunk=chunk)], (*args, None), slope)
    helpers.assert_finite(actual)
    expected = [reference.attend(*helpers.wide([x[b] for x in args]), scale=SCALE)[0] for b in range(BATCH)]
    helpers.assert_close(actual[0], np.stack(expected), helpers.FLOAT32)


def test_bfloat16_arguments_give_bfloat16_results_from_float32_sums():
    case = (13, 4, 4, 2, 6, 3, True)
    *parts, segments = arguments(case)
    narrow = helpers.cast((*parts, helpers.normal(9, BATCH, 13, 4, 3)), jnp.bfloat16)
    chunked, dense = with_gradients(
        [functools.partial(attend, chunk=c) for c in (4, 512)], (*narrow[:3], segments), narrow[3]
    )
    same = helpers.cast(narrow, np.float32)
    [expected] = with_gradients([naive_attend], (*same[:3], segments), same[3])
    for actual in (chunked, dense):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(actual)} == {"bfloat16"}
        helpers.assert_close(actual[0], expected[0], helpers.BFLOAT16)
        helpers.assert_close(actual[1], expected[1], helpers.BFLOAT16_GRADIENT)


def named(jaxpr) -> dict[str, Any]:
    """What each name marks in a jaxpr."""
    marks = [e for e in helpers.equations(jaxpr) if e.primitive.name == "name"]
    return {e.params["name"]: e.outvars[0].aval for e in marks}


@pytest.mark.parametrize("chunk", [4, 512])
def test_the_forward_rule_names_the_context_and_a_float32_log_sum_exp(chunk):
    args = helpers.cast(arguments((13, chunk, 4, 2, 6, 3, False))[:3], jnp.bfloat16)
    marks = named(jax.make_jaxpr(lambda *x: jax.vjp(functools.partial(attend, chunk=chunk), *x)[0])(*args))
    assert marks["attn_context"].shape == (BATCH, 13, 4, 3)
    assert marks["attn_context"].dtype == jnp.bfloat16
    assert marks["attn_lse"].shape == (BATCH, 4, 13)
    assert marks["attn_lse"].dtype == jnp.float32


def products(f, args) -> int:
    """Matrix products of a function and its gradients."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(f(*x) ** 2), (0, 1, 2)))(*args)
    return sum(e.primitive.name == "dot_general" for e in helpers.equations(jaxpr))


@pytest.mark.parametrize("chunk", [4, 512])
def test_saving_both_names_spares_the_backward_pass_the_forward_one(chunk):
    args = arguments((13, chunk, 4, 2, 6, 3, False))[:3]
    f = functools.partial(attend, chunk=chunk)
    save = jax.checkpoint_policies.save_only_these_names
    kept = jax.checkpoint(f, policy=save("attn_context", "attn_lse"))
    assert products(kept, args) == products(f, args)
    assert products(jax.checkpoint(f, policy=save("attn_context")), args) > products(f, args)


def in_layers(query, key, value, segments):
    """Two layers in a scan, recomputed: JAX moves out of both loops what depends on none of these arguments."""

    def layer(x, _):
        return x + attend(x, key, value, segments, chunk=256), None

    remat = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    return jax.lax.scan(remat, query, None, length=2)[0]


@pytest.mark.parametrize(
    ("function", "linear"), [(functools.partial(attend, chunk=256), True), (in_layers, True), (naive_attend, False)]
)
def test_memory_grows_linearly_with_the_sequence(function, linear):
    length, heads = 4096, 2
    shapes = [jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in (heads, 1, 1)]
    loss = jax.value_and_grad(lambda q, k, v: jnp.sum(function(q, k, v, None) ** 2), (0, 1, 2))
    largest = max(aval.size for aval in helpers.avals(jax.make_jaxpr(loss)(*shapes)))
    assert (largest < length * length // 4) == linear


def test_no_mask_in_the_shape_of_the_scores_leaves_the_loop_over_layers():
    query, key = (jax.ShapeDtypeStruct((4, 256, heads, 8), jnp.float32) for heads in (4, 2))
    loss = jax.grad(lambda q, k: jnp.sum(in_layers(q, k, k, None) ** 2), (0, 1))
    outside: Any = jax.make_jaxpr(loss)(query, key).eqns
    assert max(result.aval.size for equation in outside for result in equation.outvars) < 4 * 4 * 256 * 256


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in (8, 13)], ids=str)
def test_queries_of_some_positions_see_what_they_see_among_all(case):
    """Values, and gradients that add up: what a mesh that splits the sequence rests on."""
    query, key, value, segments = arguments(case)
    first, last, chunk = 3, 7, case[1]
    slope = jnp.asarray(helpers.normal(9, *query.shape[:3], value.shape[-1]))
    slope = slope.at[:, :first].set(0.0).at[:, last:].set(0.0)

    def whole(query, key, value):
        return attend(query, key, value, segments, chunk=chunk)

    def part(query, key, value):
        some = jax.lax.dynamic_slice_in_dim(query, first, last - first, axis=1)
        some = local_attend(
            some, key, value, segments, scale=SCALE, chunk=chunk, first=jnp.asarray(first, jnp.int32), **TAGS
        )
        return jnp.zeros(slope.shape, jnp.float32).at[:, first:last].set(some)

    @helpers.jit
    def both(query, key, value):
        results = []
        for function in (whole, part):
            y, pull = jax.vjp(function, query, key, value)
            results.append((y[:, first:last], pull(slope)))
        return results

    expected, actual = both(query, key, value)
    helpers.assert_close(actual, expected, helpers.FLOAT32)
