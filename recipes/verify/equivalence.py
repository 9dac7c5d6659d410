"""Does a placement change the numbers? Checks for one's own modules, and Hypothesis strategies that draw what to check.

A property test of a module of one's own that holds a `layers.Stack` and is called as `model(x)`:

    example = (jax.ShapeDtypeStruct((1, 8, 16), jnp.float32),)

    @given(equivalence.placements(model, example))
    def test_placement_changes_nothing(placement):
        equivalence.assert_saved(loss, placement, model, x, example=example)
        equivalence.assert_equivalent(loss, placement, model, x, example=example, tolerance=1e-5)

`loss(model, x)` is any scalar. Checking alone needs no Hypothesis; only the strategies import it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from layers.buffer import split_buffers
from layers.tag import tags
from recipes.placement.effect import DEFAULT_EXAMPLE, savable, stacks
from recipes.placement.resolve import Table, place, resolve
from recipes.placement.segments import replace_places, unplace
from recipes.placement.spec import PLACES, Placement
from recipes.verify.tracing import trace
from zoo.deepseek.config import DeepSeekConfig, RouterConfig
from zoo.llama.config import LlamaConfig
from zoo.registry import ModelConfig

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Scalar = Callable[..., Array]  # fn(model, *args) -> a scalar


@dataclass(frozen=True)
class Difference:
    """The largest difference in any leaf, relative to the largest magnitude of the expected leaf, and that leaf."""

    worst: float
    worst_leaf: str


def value_and_gradient(fn: Scalar, model: PyTree, *args: Any, options: Mapping[str, Any] | None = None) -> PyTree:
    """`fn(model, *args)` and its gradient as NumPy arrays, compiled with XLA's `options`; `model` placed or canonical.

    The gradient has the model's structure, with None for buffers and integers.
    """

    def program(model: PyTree, *args: Any) -> PyTree:
        return _value_and_gradient(fn, model, *args)

    return jax.tree.map(np.asarray, jax.jit(program, compiler_options=dict(options or {}))(model, *args))


def assert_equivalent(
    fn: Scalar,
    placement: Placement,
    model: PyTree,
    *args: Any,
    tolerance: float = 0.0,
    example: Sequence[Any] = DEFAULT_EXAMPLE,
    expected: PyTree = None,
    options: Mapping[str, Any] | None = None,
) -> Difference:
    """Asserts that value and gradient of `fn(model, *args)` do not depend on the placement.

    Bit for bit, where `host` is turned to `device` and all else stays; within `tolerance`, between the placed program
    and the canonical model, which saves everything and has no segments. `model` is canonical and is not consumed;
    `example` is what `resolve` takes. `expected` spares computing `value_and_gradient(fn, model, *args)` each time.
    Returns the difference to the canonical model. Raises AssertionError naming the worst leaf.
    """
    source = jax.tree.map(np.asarray, model)  # `place` donates
    table = resolve(placement, model, example)
    placed = place(source, placement, table=table)
    actual = unplace(value_and_gradient(fn, placed, *args, options=options))
    if table.place_bytes("host"):  # else it is its own twin
        twin = replace_places(placed, lambda place: "device" if place == "host" else place)
        to_twin = difference(actual, unplace(value_and_gradient(fn, twin, *args, options=options)))
        assert to_twin.worst == 0, f"host and device differ: {to_twin.worst_leaf} by {to_twin.worst:.3e}; {placement}"
    if expected is None:
        expected = value_and_gradient(fn, model, *args, options=options)
    found = difference(actual, expected)
    assert found.worst <= tolerance, (
        f"{found.worst_leaf}: the placed program differs from the canonical one by {found.worst:.3e} of the largest "
        f"value > {tolerance:g}; {placement}"
    )
    return found


def assert_saved(
    fn: Scalar, placement: Placement, model: PyTree, *args: Any, example: Sequence[Any] = DEFAULT_EXAMPLE
) -> Table:
    """Asserts that the gradient of `fn(model, *args)` saves what the placement asks, no more and no less, and where.

    Cell by cell, to the byte: `recipes.verify.trace` finds every tagged residual in the jaxpr. Nothing is compiled; all
    arguments may be `jax.ShapeDtypeStruct`s. `example` is what `resolve` takes, and must have the sizes of `args`.
    Returns the table.
    """
    table = resolve(placement, model, example)
    placed = place(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model), placement, table=table)
    found = trace(lambda model, *args: _value_and_gradient(fn, model, *args), placed, *args, asked=table)
    assert found.ok, f"{found}\n{table}"
    return table


def difference(actual: PyTree, expected: PyTree) -> Difference:
    """The worst leaf of two trees of equal structure; a leaf that should be zero, or is not finite, is off by inf."""
    worst = Difference(0.0, "")
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, f"{jax.tree_util.keystr(path)}: {a.shape} is not {e.shape}"
        largest, scale = np.max(np.abs(a - e), initial=0.0), np.max(np.abs(e), initial=0.0)
        relative = np.inf if not np.isfinite(largest) or (largest and not scale) else largest / (scale or 1.0)
        if relative > worst.worst:
            worst = Difference(float(relative), jax.tree_util.keystr(path))
    return worst


@dataclass(frozen=True)
class Sample:
    """A model small enough to be traced and compiled often, and the size of the batch that it is called with."""

    config: ModelConfig
    batch_size: int
    sequence_length: int

    @property
    def example(self) -> tuple[jax.ShapeDtypeStruct]:
        """What `resolve` takes."""
        return (jax.ShapeDtypeStruct((self.batch_size, self.sequence_length), jnp.int32),)

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """Random tokens, one more than the model is called with."""
        shape = (self.batch_size, self.sequence_length + 1)
        return {"tokens": np.random.default_rng(seed).integers(0, self.config.vocab_size, shape, np.int32)}


def model_configs() -> "SearchStrategy[Sample]":
    """Draws one of `SAMPLES`: few, so that what is computed of each can be kept."""
    from hypothesis import strategies as st

    return st.sampled_from(list(SAMPLES.values()))


def placements(
    model: PyTree, example: Sequence[Any] = DEFAULT_EXAMPLE, *, max_rows: int = 2
) -> "SearchStrategy[Placement]":
    """Draws placements of a canonical model: every layer has a row of its own out of at most `max_rows`.

    A cell that has no effect, or follows another, is never named; any other cell is named or left to the default.
    `model(*example)` is traced once.
    """
    from hypothesis import strategies as st

    blocks = [block for stack in stacks(model) for block in stack.blocks]
    named = {tag.name: tag for tag in tags(model) if tag.follows is None}
    cells = [[name for name in sizes if name in named] for sizes in savable(model, example)]
    words = {name: ["default", "device", "host", *(["remat"] * (not tag.carried))] for name, tag in named.items()}
    row = st.fixed_dictionaries({name: st.sampled_from(choice) for name, choice in words.items()})

    @st.composite
    def draw_placement(draw: Any) -> Placement:
        rows = draw(st.lists(row, min_size=1, max_size=max_rows))
        which = draw(st.lists(st.sampled_from(rows), min_size=len(blocks), max_size=len(blocks)))
        layers = {
            str(layer): {name: which[layer][name] for name in names if which[layer][name] != "default"}
            for layer, names in enumerate(cells)
        }
        return Placement(default=draw(st.sampled_from(PLACES)), layers=layers, group=draw(st.integers(1, 2)))

    return draw_placement()


def _value_and_gradient(fn: Scalar, model: PyTree, *args: Any) -> PyTree:
    trainable, buffers = split_buffers(model)
    params, rest = eqx.partition(trainable, eqx.is_inexact_array)
    return jax.value_and_grad(lambda params: fn(eqx.combine(params, rest, buffers), *args))(params)


def _llama(**fields: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2}
    return LlamaConfig(**sizes | {"mlp_dim": 12, "init_std": 0.3} | fields)


def _deepseek(router: RouterConfig, **fields: Any) -> DeepSeekConfig:
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 8, "num_heads": 2, "query_rank": 5, "kv_rank": 4}
    sizes |= {"nope_head_dim": 3, "rope_head_dim": 2, "value_head_dim": 3, "mlp_dim": 12, "expert_dim": 6}
    sizes |= {"experts_per_token": 2, "num_shared_experts": 1, "init_std": 0.3}
    return DeepSeekConfig(router=router, **sizes | fields)


_V2 = RouterConfig(affinity="softmax", selection_bias=False, normalize=False, group_score="max")

SAMPLES: dict[str, Sample] = {
    "llama_one_layer": Sample(_llama(num_layers=1), 1, 5),
    "llama_tied": Sample(_llama(num_layers=4, tied_embeddings=True), 2, 8),
    "llama_five_layers": Sample(_llama(num_layers=5, num_kv_heads=1, dim=6), 3, 5),
    "deepseek_one_expert": Sample(
        _deepseek(
            RouterConfig(),
            num_layers=1,
            num_dense_layers=0,
            num_experts=1,
            experts_per_token=1,
            num_shared_experts=0,
        ),
        1,
        5,
    ),
    "deepseek_nine_experts": Sample(
        _deepseek(RouterConfig(groups=3, groups_kept=2), num_layers=2, num_dense_layers=1, num_experts=9), 1, 7
    ),
    "deepseek_v2": Sample(
        _deepseek(_V2, num_layers=2, num_dense_layers=1, num_experts=4, query_rank=None, tied_embeddings=True), 2, 5
    ),
    "deepseek_all_moe": Sample(_deepseek(RouterConfig(), num_layers=2, num_dense_layers=0, num_experts=4), 2, 8),
    "deepseek_mtp": Sample(
        _deepseek(RouterConfig(), num_layers=1, num_dense_layers=1, num_experts=2, num_mtp_layers=1), 1, 5
    ),
}
