"""What a gradient's jaxpr keeps from the forward pass to the backward pass, and where."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]

# Operations through which a saved value passes unchanged between its tag and the end of the scan's body.
_TRANSPARENT = ("device_put", "reduce_precision", "optimization_barrier")


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
        body = scan.params["jaxpr"].jaxpr
        producers = {out: eqn for eqn in _inlined(body) for out in eqn.outvars}
        if not any(eqn.primitive.name == "name" for eqn in producers.values()):
            continue
        length = scan.params["length"]
        # Only what is stacked over the layers; a carry has the same dims outside and inside.
        pairs = zip(scan.outvars, body.outvars, strict=True)
        stacked = [inner for outer, inner in pairs if _dims(outer) > _dims(inner)]
        residuals = [_residual(out, producers, number, length) for out in stacked]
        if any(residuals):
            found += [residual for residual in residuals if residual is not None]
            number += 1
    return found


def host_bytes(program: ClosedJaxpr) -> int:
    """Bytes of all tagged residuals on the host."""
    return sum(residual.layers * residual.layer_bytes for residual in saved(program) if residual.place == "host")


def _residual(out: Var | Literal, producers: dict[Var, JaxprEqn], scan: int, length: int) -> Residual | None:
    name, var = None, out
    while isinstance(var, Var) and var in producers:
        eqn = producers[var]
        if eqn.primitive.name == "name":
            name = eqn.params["name"]
            break
        if eqn.primitive.name not in _TRANSPARENT:
            break
        var = eqn.invars[eqn.outvars.index(var)]
    if name is None:
        return None
    aval: Any = out.aval
    place = "host" if aval.memory_space == jax.memory.Space.Host else "device"
    return Residual(
        tag=name,
        scan=scan,
        layers=length,
        place=place,
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


def _inlined(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Equations of a scan's body; those of inner scans are not part of it."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "scan":
            for inner in _bodies(eqn):
                yield from _inlined(inner)


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
