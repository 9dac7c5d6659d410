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

from recipes.placement.hosted import at_hand, move, place_of
from recipes.placement.settle import settled
from recipes.step.elementwise import not_elementwise
from recipes.step.pieces import Piece, Pieces, any_on_host, is_run, pieces_of
from zoo.checks import ConfigError


class Trained(NamedTuple):
    """What an update changes: the parameters that are trained, their float32 masters (None: themselves), moments."""

    params: PyTree
    master: PyTree
    opt_state: PyTree


Scale = Callable[[Array], Array]  # of a gradient as it stands, to the float32 that the optimizer sees
Step = Callable[[Trained, PyTree], Trained]


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

    `norm` is that of all gradients, for transformations that ask for `global_norm`
    (`recipes.optim.clip_by_global_norm`).
    """
    transform = optax.with_extra_args_support(optimizer)
    norm = jax.lax.optimization_barrier(norm)

    def step(trained: Trained, gradients: PyTree) -> Trained:
        master = trained.params if trained.master is None else trained.master
        trained, gradients = jax.lax.optimization_barrier((trained, gradients))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            slopes = jax.tree.map(scale, gradients)
            updates, opt_state = transform.update(slopes, trained.opt_state, master, global_norm=norm)
        new = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda old, new: new.astype(old.dtype), trained.params, new)
        after = Trained(params, None if trained.master is None else new, opt_state)
        return jax.lax.optimization_barrier(jax.tree.map(lambda new, old: jnp.where(keep, new, old), after, trained))

    names = not_elementwise(optimizer, trained.params)
    if names:
        _require_device(names, (trained, gradients))
        return step(trained, gradients)
    pieces = pieces_of(optimizer, trained.params)
    parts = []
    for piece in pieces:
        own = Trained(*(pieces.own(tree, piece) for tree in trained))
        parts.append(_in_a_loop(step, own, pieces.own(gradients, piece), pieces, piece))
    return eqx.combine(*parts)


def _require_device(names: list[str], trees: PyTree) -> None:
    """Raises ConfigError where an optimizer that needs whole arrays would get them layer by layer."""
    if any_on_host(trees):
        problem = f"{', '.join(names)} needs whole arrays, and what is on the host is updated layer by layer"
        hint = "recipes.optim.clip_by_global_norm in its place" if names == ["clip_by_global_norm"] else None
        raise ConfigError("placement.state", "host", problem, hint=hint or "keep the state on the device")


def _in_a_loop(step: Step, trained: Trained, gradients: PyTree, pieces: Pieces, piece: Piece) -> Trained:
    """The update of a segment's stacks, layer by layer; or of one array, in a loop of one step.

    Without the loop XLA would bring that array to the device at the start of the program.
    """
    leaves, structure = jax.tree.flatten(trained)
    shared = [False] * len(jax.tree.leaves(trained[:2])) + pieces.is_shared(trained.opt_state)
    stacked = piece in pieces.segments

    def read(array: Array, layer: Array) -> Array:
        """One layer of a stack, with its leading dim."""
        return move(jax.lax.dynamic_slice_in_dim(array, layer, 1) if stacked else array, "device")

    def write(array: Array, new: Array, layer: Array) -> Array:
        new = move(new, place_of(array))
        return jax.lax.dynamic_update_slice_in_dim(array, new, layer, 0) if stacked else new

    def visit(carried: list[Array], layer: Array) -> tuple[list[Array], None]:
        # What all layers share starts, for each, from what it was before the first.
        now = [old if same else read(x, layer) for x, old, same in zip(carried, leaves, shared, strict=True)]
        slopes = jax.tree.map(lambda x: read(x, layer), gradients)
        after = jax.tree.leaves(step(jax.tree.unflatten(structure, now), slopes))
        each = zip(carried, after, shared, strict=True)
        return [new if same else write(old, new, layer) for old, new, same in each], None

    length = jax.tree.leaves(gradients)[0].shape[0] if stacked else 1
    return jax.tree.unflatten(structure, jax.lax.scan(visit, leaves, jnp.arange(length, dtype=jnp.int32))[0])


def initial(optimizer: optax.GradientTransformation, params: PyTree, placed: PyTree) -> PyTree:
    """The optimizer's first state, where the placement of the model `placed` says; layer by layer as in `updated`."""

    def init(params: PyTree) -> PyTree:
        return settled(optimizer.init(at_hand(params)), "optimizer", placed)

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
