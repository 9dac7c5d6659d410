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
from recipes.placement.gradients import added, arrived, landings
from recipes.placement.hosted import move, place_of
from recipes.placement.segments import Run, rest_at_use
from recipes.sharding.rules import RULES, RULES_AT_USE, constrain, constrain_batch
from recipes.step.loss import Batch, Loss, next_token_loss
from recipes.step.state import Mask, TrainState, settled_state, split_state, split_trainable
from recipes.step.update import Trained, global_norm, updated

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

    A step whose loss or gradient norm is not finite leaves parameters, moments and router biases as they were. Arrays
    are where `placement.state` of the model says; those on the host pass through the device layer by layer.

    Metrics: `loss`, `grad_norm` (before clipping), `skipped` (1 where nothing was updated), `learning_rate` where the
    optimizer's state holds one, `expert_load` (largest load over the mean one, worst layer), `dropped` (share of all
    choices of experts that a dispatch with a capacity dropped), and what the loss reports.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state = settled_state(state)
        trainable, rest = split_trainable(state.params, frozen)
        run = _on_mesh(loss, mesh, wide_gradients)
        result, gradients = _gradients(run, trainable, rest, batch, accumulate, mesh)
        gradients = constrain(gradients, mesh, RULES if zero > 1 else RULES_AT_USE)
        trained = Trained(trainable, state.master, state.opt_state)
        trained, norm, keep = _updated(optimizer, trained, gradients, result)
        params = eqx.combine(trained.params, rest)
        if result.stats is not None and router_bias_rate:
            rate = router_bias_rate * keep.astype(jnp.float32)
            params = _rebalanced(params, result.stats.counts, rate, frozen)
        cursor = state.cursor + jax.tree.leaves(batch)[0].shape[0]
        new = TrainState(state.step + 1, cursor, params, trained.master, trained.opt_state)
        return split_state(new, mesh, zero), _metrics(result, norm, keep, new.opt_state)

    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options(platform))


def _updated(
    optimizer: optax.GradientTransformation, trained: Trained, gradients: PyTree, result: Loss
) -> tuple[Trained, Array, Array]:
    """What is trained after the step, the gradients' norm, and whether it and the loss are finite."""

    def scale(gradient: Array) -> Array:
        return gradient.astype(jnp.float32) / result.weight

    norm = global_norm(gradients, scale)
    keep = jnp.isfinite(norm) & jnp.isfinite(result.total)
    return updated(optimizer, trained, gradients, scale, norm, keep), norm, keep


def _on_mesh(loss: LossFunction, mesh: Mesh | None, wide: bool) -> LossFunction:
    def run(model: Any, batch: Batch) -> Loss:
        model = widened(model) if wide else model
        return loss(model, batch) if mesh is None else loss(rest_at_use(model, mesh), constrain_batch(batch, mesh))

    return run


def _rebalanced(params: PyTree, counts: Int32[Array, "layers e"], rate: Array | float, frozen: Mask | None) -> PyTree:
    """Router biases moved, but for the frozen ones."""
    moved = _move_router_biases(params, counts, rate)
    if frozen is None:
        return moved
    return jax.tree.map(lambda fixed, old, new: old if fixed else new, frozen(params), params, moved)


def _gradients(
    loss: LossFunction, trainable: PyTree, rest: PyTree, batch: Batch, accumulate: int, mesh: Mesh | None
) -> tuple[Loss, PyTree]:
    """Loss and gradients of what is trained, summed over the micro-batches; each gradient arises on its own place."""
    landing = constrain(landings(trainable), mesh)

    def summed(landing: PyTree, batch: Batch) -> tuple[Array, Loss]:
        result = loss(arrived(landing, trainable, rest), batch)
        return result.total, result

    def gradient(batch: Batch) -> tuple[Loss, PyTree]:
        (_, result), gradients = jax.value_and_grad(summed, has_aux=True)(landing, batch)
        return result, gradients

    if accumulate == 1:
        return gradient(batch)
    # Interleaved, so that each device of a sharded batch keeps its own sequences.
    micro = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), dict(batch))

    def add(sums: tuple[Loss, PyTree], batch: Batch) -> tuple[tuple[Loss, PyTree], None]:
        result, gradients = gradient(batch)
        total = jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums[0], result)
        return (total, added(sums[1], gradients)), None

    result, gradients = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], micro))
    gradients = jax.tree.map(lambda g: move(jnp.zeros(g.shape, jnp.float32), place_of(g)), gradients)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    return jax.lax.scan(add, (zeros, gradients), micro)[0]


def _move_router_biases(model: PyTree, counts: Int32[Array, "layers e"], rate: Array | float) -> PyTree:
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


def _metrics(result: Loss, norm: Array, keep: Array, opt_state: PyTree) -> Metrics:
    metrics: dict[str, Float32[Array, ""]] = {"loss": result.total / result.weight}
    metrics |= {name: value / result.weight for name, value in result.metrics.items()}
    metrics |= {"grad_norm": norm, "skipped": 1.0 - keep.astype(jnp.float32)}
    rates: Mapping = dict(optax.tree.get_all_with_path(opt_state, "learning_rate"))
    if rates:
        metrics["learning_rate"] = next(iter(rates.values()))
    if result.stats is not None:
        load = result.stats.counts.astype(jnp.float32)
        metrics["expert_load"] = jnp.max(jnp.max(load, axis=-1) / jnp.mean(load, axis=-1))
        metrics["dropped"] = jnp.sum(result.stats.dropped).astype(jnp.float32) / jnp.sum(load)
    return metrics
