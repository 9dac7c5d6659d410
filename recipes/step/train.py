"""The train step: a pure function of state and batch."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int32, PyTree

from layers.router import Router
from layers.wide import widened
from recipes.flags import compiler_options
from recipes.placement.segments import Run, rest_at_use
from recipes.sharding.rules import RULES, RULES_AT_USE, constrain, constrain_batch
from recipes.step.loss import Batch, Loss, next_token_loss
from recipes.step.state import Mask, TrainState, cast, split_state, split_trainable

LossFunction = Callable[[Any, Batch], Loss]
Metrics = dict[str, Array]


def make_train_step(
    optimizer: optax.GradientTransformation,
    loss: LossFunction = next_token_loss,
    accumulate: int = 1,
    *,
    router_bias_rate: float = 0.0,
    frozen: Mask | None = None,
    mesh: Mesh | None = None,
    zero: int = 3,
    wide_gradients: bool = False,
    platform: str | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    r"""A jitted step `(state, batch) -> (state, metrics)` that donates the state and closes over no arrays.

    - `loss(model, batch) -> Loss`; the gradient is that of `total / weight` of the whole batch.
    - `accumulate`: micro-batches, computed one after another; sequence `i` belongs to micro-batch `i % accumulate`.
    - `router_bias_rate`: $\gamma$ of $b_e \leftarrow b_e + \gamma\, \mathrm{sign}(\bar c - c_e)$ with $c$ the load of
      each expert in the batch (DeepSeek-V3, section 2.1.2): outside the gradient, without decay or moments.
    - `frozen`: a mask (`recipes.canonical_mask`) that is true for what no step changes, router biases among it. There
      are no gradients of it; `init_state` takes the same mask.
    - `mesh`: what splits state and batch, as for `recipes.place`; `zero`: how much of them, as for `MeshConfig`.
    - `wide_gradients`: whether gradients are summed over tokens and devices in float32 and rounded to the dtype of
      computation once after, rather than on each device before: twice the bytes between devices.
    - `platform`: whose compiler options the step carries, by default those of the device at hand.

    Metrics: `loss`, `grad_norm` (before clipping), `learning_rate` where the optimizer's state holds one,
    `expert_load` (largest load over the mean one, worst layer), `dropped` (share of all choices of experts that a
    dispatch with a capacity dropped), and what the loss reports.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        trainable, rest = split_trainable(state.params, frozen)
        result, gradients = _gradients(_on_mesh(loss, mesh, wide_gradients), trainable, rest, batch, accumulate)
        gradients = constrain(gradients, mesh, RULES if zero > 1 else RULES_AT_USE)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / result.weight, gradients)
        new = _updated(optimizer, state, gradients, trainable, rest, jax.tree.leaves(batch)[0].shape[0])
        if result.stats is not None and router_bias_rate:
            params = _rebalanced(new.params, result.stats.counts, router_bias_rate, frozen)
            new = dataclasses.replace(new, params=params)
        return split_state(new, mesh, zero), _metrics(result, gradients, new.opt_state)

    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options(platform))


def _updated(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: PyTree,
    trainable: PyTree,
    rest: PyTree,
    num_sequences: int,
) -> TrainState:
    """The state after the optimizer's step; `trainable` and `rest` are its parameters."""
    master = trainable if state.master is None else state.master
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        updates, opt_state = optimizer.update(gradients, state.opt_state, master)
    master = optax.apply_updates(master, updates)
    params = eqx.combine(master, rest)
    if state.master is not None:
        params = cast(params, jax.tree.leaves(trainable)[0].dtype)
    return TrainState(
        step=state.step + 1,
        cursor=state.cursor + num_sequences,
        params=params,
        master=None if state.master is None else master,
        opt_state=opt_state,
    )


def _on_mesh(loss: LossFunction, mesh: Mesh | None, wide: bool) -> LossFunction:
    def run(model: Any, batch: Batch) -> Loss:
        model = widened(model) if wide else model
        return loss(model, batch) if mesh is None else loss(rest_at_use(model, mesh), constrain_batch(batch, mesh))

    return run


def _rebalanced(params: PyTree, counts: Int32[Array, "layers e"], rate: float, frozen: Mask | None) -> PyTree:
    """Router biases moved, but for the frozen ones."""
    moved = _move_router_biases(params, counts, rate)
    if frozen is None:
        return moved
    return jax.tree.map(lambda fixed, old, new: old if fixed else new, frozen(params), params, moved)


def _gradients(
    loss: LossFunction, trainable: PyTree, rest: PyTree, batch: Batch, accumulate: int
) -> tuple[Loss, PyTree]:
    """Loss and gradients of what is trained, summed over the micro-batches."""

    def summed(trainable: PyTree, batch: Batch) -> tuple[Array, Loss]:
        result = loss(eqx.combine(trainable, rest), batch)
        return result.total, result

    def gradient(batch: Batch) -> tuple[Loss, PyTree]:
        (_, result), gradients = jax.value_and_grad(summed, has_aux=True)(trainable, batch)
        return result, gradients

    if accumulate == 1:
        return gradient(batch)
    # Interleaved, so that each device of a sharded batch keeps its own sequences.
    micro = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), dict(batch))

    def add(sums: PyTree, batch: Batch) -> tuple[PyTree, None]:
        return jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, gradient(batch)), None

    result, gradients = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], micro))
    gradients = jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), gradients)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    return jax.lax.scan(add, (zeros, gradients), micro)[0]


def _move_router_biases(model: PyTree, counts: Int32[Array, "layers e"], rate: float) -> PyTree:
    """Each router's bias one step towards an even load; `counts` are in the order of the layers."""
    load = counts.astype(jnp.float32)
    moves = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    done = 0

    def take(layers: int) -> Array:
        nonlocal done
        done += layers
        return moves[done - layers : done]

    def change(node: Any) -> Any:
        if isinstance(node, Router):
            return _moved(node, take(1)[0])
        if isinstance(node, Run) and any(map(_is_router, jax.tree.leaves(node, is_leaf=_is_router))):
            own = take(len(node.layers)).reshape(node.length, len(node.blocks), -1)
            blocks = tuple(
                jax.tree.map(lambda leaf, i=i: _moved(leaf, own[:, i]), block, is_leaf=_is_router)
                for i, block in enumerate(node.blocks)
            )
            return dataclasses.replace(node, blocks=blocks)
        return node

    return jax.tree.map(change, model, is_leaf=lambda node: isinstance(node, Router | Run))


def _is_router(node: object) -> bool:
    return isinstance(node, Router)


def _moved(node: Any, move: Array) -> Any:
    if not isinstance(node, Router) or node.bias is None:
        return node
    return eqx.tree_at(lambda router: router.bias.value, node, node.bias.value + move)


def _metrics(result: Loss, gradients: PyTree, opt_state: PyTree) -> Metrics:
    metrics: dict[str, Float32[Array, ""]] = {"loss": result.total / result.weight}
    metrics |= {name: value / result.weight for name, value in result.metrics.items()}
    metrics["grad_norm"] = optax.tree.norm(gradients)
    rates: Mapping = dict(optax.tree.get_all_with_path(opt_state, "learning_rate"))
    if rates:
        metrics["learning_rate"] = next(iter(rates.values()))
    if result.stats is not None:
        load = result.stats.counts.astype(jnp.float32)
        metrics["expert_load"] = jnp.max(jnp.max(load, axis=-1) / jnp.mean(load, axis=-1))
        metrics["dropped"] = jnp.sum(result.stats.dropped).astype(jnp.float32) / jnp.sum(load)
    return metrics
