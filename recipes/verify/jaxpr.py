"""What a gradient's jaxpr keeps from the forward pass to the backward pass, and where."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, primitives  # pyright: ignore[reportPrivateImportUsage]

# Operations through which a saved value passes unchanged between its tag and the end of the scan's body.
_TRANSPARENT = ("device_put", "reduce_precision", "optimization_barrier")
_CALLS = (primitives.jit_p, primitives.remat_p, primitives.custom_jvp_call_p, primitives.custom_vjp_call_p)


@dataclass(frozen=True)
class Residual:
    """A tagged array that a scan over layers saves for the backward pass.

    - `tag`: the full name; `scan`: which scan of the program, counted from 0; `layers`: its length.
    - `place`: `device` or `host`; `shape`, `dtype`: of one layer's array.
    """

    tag: str
    scan: int
    layers: int
    place: str
    shape: tuple[int, ...]
    dtype: str
    layer_bytes: int


def saved(program: ClosedJaxpr) -> list[Residual]:
    """The tagged residuals of every scan over layers in the jaxpr of a gradient, in order of the program.

    `saved(jax.make_jaxpr(jax.grad(loss))(params, batch))`. A scan that marks no array is not counted. A tag that is
    recomputed, or that no backward rule reads, does not appear.
    """
    found: list[Residual] = []
    number = 0
    for scan in _scans(program.jaxpr):
        body, length = scan.params["jaxpr"].jaxpr, scan.params["length"]
        # Only what is stacked over the layers; a carry has the same dims outside and inside.
        pairs = zip(scan.outvars, body.outvars, strict=True)
        stacked = [inner for outer, inner in pairs if _dims(outer) > _dims(inner)]
        named = [(tag, out) for out in stacked if (tag := _origin(body, out)) and isinstance(tag, str)]
        found += [_residual(tag, out, number, length) for tag, out in named]
        number += bool(named)
    return found


def host_bytes(program: ClosedJaxpr) -> int:
    """Bytes of all tagged residuals on the host."""
    return sum(residual.layers * residual.layer_bytes for residual in saved(program) if residual.place == "host")


def _origin(jaxpr: Jaxpr, var: Any) -> str | Var | None:
    """The tag that names a variable, or the input of `jaxpr` that it is, unchanged; None if it is neither."""
    producers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while isinstance(var, Var) and var in producers:
        eqn = producers[var]
        position = eqn.outvars.index(var)
        if eqn.primitive.name == "name":
            return eqn.params["name"]
        if eqn.primitive.name in _TRANSPARENT:
            var = eqn.invars[position]
        elif eqn.primitive in _CALLS:
            (inner,) = _bodies(eqn)
            origin = _origin(inner, inner.outvars[position])
            if not isinstance(origin, Var):
                return origin
            var = eqn.invars[inner.invars.index(origin)]
        else:
            return None
    return var if isinstance(var, Var) and var in jaxpr.invars else None


def _residual(tag: str, out: Any, scan: int, length: int) -> Residual:
    aval = out.aval
    return Residual(
        tag=tag,
        scan=scan,
        layers=length,
        place="host" if aval.memory_space == jax.memory.Space.Host else "device",
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        layer_bytes=math.prod(aval.shape) * aval.dtype.itemsize,
    )


def _dims(var: Any) -> int:
    return var.aval.ndim


def _scans(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Scans of the program, outermost ones that mark arrays first found; a scan over micro-batches is entered."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in _bodies(eqn):
            yield from _scans(inner)


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
