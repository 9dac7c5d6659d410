"""The optimizer's work, layer by layer and in place, wherever the arrays are.

A loop carries a segment's stacks and changes one layer after another. Of what is on the host nothing is moved to the
device but a layer of a segment, or an array that stands outside of all segments. Layer by layer on the device too: so
that the numbers do not depend on the place. Only optimizers that are not elementwise get whole arrays.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float32, PyTree

from recipes.placement.hosted import at_hand, layer_of, move, on_host, place_of, with_layer
from recipes.placement.segments import is_run
from recipes.placement.settle import places_in, settled
from recipes.step.elementwise import not_elementwise
from recipes.step.pieces import Piece, Pieces, any_on_host, pieces_of
from zoo.checks import ConfigError


class Trained(NamedTuple):
    """What an update changes: the parameters that are trained, their float32 masters (None: themselves), moments."""

    params: PyTree
    master: PyTree
    opt_state: PyTree


class Optimised(NamedTuple):
    """What an optimizer changes: the masters, or the parameters where there are none, and its own state."""

    weights: PyTree
    opt_state: PyTree


Scale = Callable[[Array], Array]  # of a gradient as it stands, to the float32 that the optimizer sees
Step = Callable[[Optimised, PyTree], Optimised]


def global_norm(gradients: PyTree, scale: Scale) -> Float32[Array, ""]:
    """The norm of all scaled gradients.

    Squares are summed layer by layer wherever the gradients are, so that the norm does not depend on it.
    """
    parts = []
    for node in jax.tree.leaves(gradients, is_leaf=is_run):
        # Layer by layer on the device too: there XLA would copy the stack of all, to sum it in its favourite layout.
        squares = partial(_squares, scale=scale)
        parts += [jax.lax.map(squares, leaf) if is_run(node) else squares(leaf)[None] for leaf in jax.tree.leaves(node)]
    # A barrier: XLA would merge sums of sums, and take them in another order for each place.
    return jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(jnp.concatenate(parts))))


def _squares(gradient: Array, scale: Scale) -> Float32[Array, ""]:
    # A barrier: else what is squared may be the gradient before it was rounded, or summed in the order of what made it.
    return jnp.sum(jnp.square(scale(jax.lax.optimization_barrier(move(gradient, "device")))))


def updated(
    optimizer: optax.GradientTransformation,
    trained: Trained,
    gradients: PyTree,
    scale: Scale,
    norm: Float32[Array, ""],
    keep: Bool[Array, ""],
) -> Trained:
    """`trained` after a step by the scaled gradients, or as it was where `keep` is false.

    Parameters that have masters are these, rounded: they are written, never read.
    `norm` is that of all gradients, for transformations that ask for `global_norm`
    (`recipes.optim.clip_by_global_norm`).
    """
    transform = optax.with_extra_args_support(optimizer)
    norm = jax.lax.optimization_barrier(norm)

    def step(state: Optimised, gradients: PyTree) -> Optimised:
        state, gradients = jax.lax.optimization_barrier((state, gradients))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            slopes = jax.tree.map(scale, gradients)
            updates, opt_state = transform.update(slopes, state.opt_state, state.weights, global_norm=norm)
        new = Optimised(optax.apply_updates(state.weights, updates), opt_state)
        return jax.lax.optimization_barrier(jax.tree.map(lambda new, old: jnp.where(keep, new, old), new, state))

    weights, params = (trained.params, None) if trained.master is None else (trained.master, trained.params)
    new, params = _stepped(step, optimizer, Optimised(weights, trained.opt_state), params, gradients)
    return Trained(new.weights, None, new.opt_state) if trained.master is None else Trained(params, *new)


def _stepped(
    step: Step, optimizer: optax.GradientTransformation, state: Optimised, params: PyTree, gradients: PyTree
) -> tuple[Optimised, PyTree]:
    """The state after a step, and the `params` that are its weights rounded (None: there are none)."""
    names = not_elementwise(optimizer, state.weights)
    if names:
        _require_device(names, (state, params, gradients))
        new = step(state, gradients)
        return new, _rounded(new.weights, params)
    pieces = pieces_of(optimizer, state.weights)
    parts = []
    for piece in pieces:
        own = Optimised(*(pieces.own(tree, piece) for tree in state))
        parts.append(_in_a_loop(step, own, pieces.own(params, piece), pieces.own(gradients, piece), pieces, piece))
    return eqx.combine(*parts)


def _rounded(weights: PyTree, params: PyTree) -> PyTree:
    """Parameters anew, of their masters."""
    return None if params is None else jax.tree.map(lambda new, old: new.astype(old.dtype), weights, params)


def _require_device(names: list[str], trees: PyTree) -> None:
    """Raises ConfigError where an optimizer that needs whole arrays would get them layer by layer."""
    if any_on_host(trees):
        problem = f"{', '.join(names)} needs whole arrays, and what is on the host is updated layer by layer"
        hint = "recipes.optim.clip_by_global_norm in its place" if names == ["clip_by_global_norm"] else None
        raise ConfigError("placement.state", "host", problem, hint=hint or "keep the state on the device")


def _in_a_loop(
    step: Step, state: Optimised, params: PyTree, gradients: PyTree, pieces: Pieces, piece: Piece
) -> tuple[Optimised, PyTree]:
    """The update of a segment's stacks, layer by layer; or of one array, in a loop of one step.

    Without the loop XLA would bring that array to the device at the start of the program.
    """
    before, structure = jax.tree.flatten(state)
    shared = [False] * len(jax.tree.leaves(state.weights)) + pieces.is_shared(state.opt_state)
    stacked = piece in pieces.segments
    hosted = None if params is None else jax.tree.map(lambda *pair: any(map(on_host, pair)), params, state.weights)

    def read(array: Array, layer: Array) -> Array:
        return move(layer_of(array, layer) if stacked else array, "device")

    def write(array: Array, new: Array, layer: Array) -> Array:
        return with_layer(array, new, layer) if stacked else move(new, place_of(array))

    def visit(carried: tuple[list[Array], PyTree], layer: Array) -> tuple[tuple[list[Array], PyTree], None]:
        stacks, far = carried
        # What all layers share starts, for each, from what it was before the first.
        now = [old if same else read(x, layer) for x, old, same in zip(stacks, before, shared, strict=True)]
        slopes = jax.tree.map(lambda x: read(x, layer), gradients)
        after = step(jax.tree.unflatten(structure, now), slopes)
        each = zip(stacks, jax.tree.leaves(after), shared, strict=True)
        stacks = [new if same else write(x, new, layer) for x, new, same in each]
        made = eqx.filter(_rounded(after.weights, params), hosted)
        return (stacks, jax.tree.map(lambda x, new: write(x, new, layer), far, made)), None

    length = jax.tree.leaves(gradients)[0].shape[0] if stacked else 1
    far, near = eqx.partition(params, hosted)
    (after, far), _ = jax.lax.scan(visit, (before, far), jnp.arange(length, dtype=jnp.int32))
    new = jax.tree.unflatten(structure, after)
    if params is None:
        return new, None
    # What is on the device, as its masters are, is rounded at once: in the loop XLA would keep the old parameters until
    # it ends, and copies of both in its favourite layout.
    rounded = _rounded(eqx.filter(new.weights, hosted, inverse=True), near)
    return new, eqx.combine(far, rounded)


def initial(optimizer: optax.GradientTransformation, params: PyTree, placed: PyTree) -> PyTree:
    """The optimizer's first state, where the placement of the model `placed` says; layer by layer as in `updated`."""

    def init(params: PyTree) -> PyTree:
        made = optimizer.init(at_hand(params))
        return settled(made, places_in(made, "optimizer", placed))

    with jax.numpy_dtype_promotion("standard"):
        made = jax.eval_shape(init, params)
        if not any_on_host((params, made)):
            return optimizer.init(params)
        pieces = pieces_of(optimizer, params)
        return eqx.combine(*(_initial(init, made, pieces, piece, params) for piece in pieces))


def _initial(init: Callable[[PyTree], PyTree], made: PyTree, pieces: Pieces, piece: Piece, params: PyTree) -> PyTree:
    """A piece's first state; `made` is what the whole state will be like."""
    own, made = pieces.own(params, piece), pieces.own(made, piece)
    if piece in pieces.arrays:
        return init(own)
    shared = pieces.is_shared(made)

    def visit(_: None, layer: PyTree) -> tuple[None, list[Array]]:
        leaves = jax.tree.leaves(init(jax.tree.map(lambda x: x[None], layer)))
        return None, [leaf if same else leaf[0] for leaf, same in zip(leaves, shared, strict=True)]

    stacks = jax.lax.scan(visit, None, own)[1]
    leaves = [stack[0] if same else stack for stack, same in zip(stacks, shared, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(made), leaves)
