"""Which optimizers may be applied to a part of the parameters at a time: those that treat each number by itself."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from recipes.verify.flat import bodies

# Of arrays of one shape, these compute each number from the numbers at the same place; others are not trusted to.
_ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp convert_element_type "
    "copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite "
    "le lgamma log log1p logistic lt max min mul ne neg nextafter not optimization_barrier or pow reduce_precision rem "
    "round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt "
    "square stop_gradient sub tan tanh xor".split()
)


def not_elementwise(optimizer: optax.GradientTransformation, params: PyTree) -> list[str]:
    """The names of the transformations that let one number of a parameter's update depend on another.

    Read from what the update traces to, for parameters of these shapes; empty if there are none. The norm of all
    gradients counts as given (`recipes.optim.clip_by_global_norm`).
    """
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    if _is_elementwise(optimizer, abstract):
        return []
    return [_name(part) for part in _parts(optimizer) if not _is_elementwise(part, abstract)] or [_name(optimizer)]


def _is_elementwise(optimizer: optax.GradientTransformation, params: PyTree) -> bool:
    transform = optax.with_extra_args_support(optimizer)

    def update(params: PyTree, gradients: PyTree, norm: Any) -> PyTree:
        return transform.update(gradients, transform.init(params), params, global_norm=norm)

    with jax.numpy_dtype_promotion("standard"):
        program = jax.make_jaxpr(update)(params, params, jax.ShapeDtypeStruct((), jnp.float32))
    return all(map(_keeps_apart, _operations(program.jaxpr)))


def _operations(jaxpr: Any) -> Iterator[Any]:
    """The operations, those of calls and branches in their place."""
    for eqn in jaxpr.eqns:
        inner = list(bodies(eqn)) if eqn.primitive.name not in ("while", "scan") else []
        for body in inner:
            yield from _operations(body)
        if not inner:
            yield eqn


def _keeps_apart(eqn: Any) -> bool:
    inputs = [var.aval.shape for var in eqn.invars if var.aval.shape]
    outputs = [var.aval.shape for var in eqn.outvars]
    if not inputs:  # numbers without dims, spread or not
        return True
    return eqn.primitive.name in _ELEMENTWISE and len({*inputs, *outputs}) == 1


def _parts(optimizer: Any) -> Iterator[optax.GradientTransformation]:
    """The transformations that a chain is made of; optax keeps them in the closures of its functions."""
    held = _closure(optimizer.update)
    if isinstance(held.get("tx"), tuple):
        yield from _parts(held["tx"])
    elif "update_fns" in held:
        inits = _closure(optimizer.init).get("init_fns", ())
        for init, update in zip(inits, held["update_fns"], strict=True):
            yield from _parts(optax.GradientTransformation(init, update))
    else:
        yield optimizer


def _closure(function: Any) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _name(optimizer: optax.GradientTransformation) -> str:
    return getattr(optimizer.update, "__qualname__", repr(optimizer.update)).partition(".")[0]
