"""What training carries from step to step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int32, PyTree

from layers.buffer import split_buffers
from recipes.placement.hosted import move, on_host, place_of
from recipes.placement.segments import is_run
from recipes.placement.settle import places_in, places_in_model, settled
from recipes.sharding.rules import RULES, RULES_AT_USE, constrain
from recipes.step.update import initial

Mask = Callable[[PyTree], PyTree]  # of parameters, as `recipes.canonical_mask` makes it


class TrainState(eqx.Module):
    """A PyTree of arrays.

    - `step`: optimizer steps done; `cursor`: sequences of the data consumed.
    - `params`: the placed model in the dtype of computation; its buffers (router biases) stay float32.
    - `master`: float32 parameters where `params` are narrower, else None: `params` are their own master.
    """

    step: Int32[Array, ""]
    cursor: Int32[Array, ""]
    params: PyTree
    master: PyTree
    opt_state: PyTree


def init_state(
    placed: PyTree, optimizer: optax.GradientTransformation, dtype: Any = jnp.float32, *, frozen: Mask | None = None
) -> TrainState:
    """The state before the first step, from a float32 model, placed or canonical; `dtype` is that of computation.

    Parameters for which the mask `frozen` is true have neither masters nor moments.
    """
    trainable, _ = split_trainable(placed, frozen)
    narrow = jnp.dtype(dtype) != jnp.float32
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        cursor=jnp.zeros((), jnp.int32),
        params=cast(placed, dtype) if narrow else placed,
        master=cast(trainable, jnp.float32) if narrow else None,
        opt_state=initial(optimizer, trainable, placed),
    )
    return jax.tree.map(_committed, settled_state(state))


def _committed(leaf: Any) -> Any:
    """An array bound to its device, as those that a step returns are: else the second step would compile anew."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return leaf
    return jax.device_put(leaf, leaf.sharding)


def settled_state(state: TrainState) -> TrainState:
    """The state with each array where the placement of its model says, traced, abstract or moved there."""
    return settled(state, _places(state))


def places_of(state: TrainState) -> list[str]:
    """The place of each array, in order, that the placement of the state's model asks for."""
    return jax.tree.leaves(_places(state))


def _places(state: TrainState) -> TrainState:
    return dataclasses.replace(
        jax.tree.map(lambda _: "device", state),
        params=places_in_model(state.params),
        master=places_in(state.master, "master", state.params),
        opt_state=places_in(state.opt_state, "optimizer", state.params),
    )


def split_state(state: TrainState, mesh: Mesh | None, zero: int = 3) -> TrainState:
    """The state in its parts on a mesh, traced, abstract or moved there. Below `zero` 3 parameters stay whole."""
    rest = constrain(dataclasses.replace(state, params=None), mesh)
    return dataclasses.replace(rest, params=constrain(state.params, mesh, RULES if zero == 3 else RULES_AT_USE))


def split_trainable(params: PyTree, frozen: Mask | None = None) -> tuple[PyTree, PyTree]:
    """`(what is trained, the rest)`: buffers are never trained, nor is what the mask is true for (`eqx.combine`)."""
    if frozen is None:
        return split_buffers(params)
    fixed, free = eqx.partition(params, frozen(params))
    trainable, buffers = split_buffers(free)
    return trainable, eqx.combine(fixed, buffers)


def cast(model: PyTree, dtype: Any) -> PyTree:
    """The model with its parameters in another float dtype, layer by layer on the host; buffers keep theirs."""
    trainable, buffers = split_buffers(model)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding, _memory_space=leaf._memory_space)
        return move(move(leaf, "device").astype(dtype), place_of(leaf))

    def change(node: Any) -> Any:
        if not is_run(node):
            return convert(node)
        return jax.tree.map(lambda x: jax.lax.map(convert, x) if on_host(x) else convert(x), node)

    return eqx.combine(jax.tree.map(change, trainable, is_leaf=is_run), buffers)
