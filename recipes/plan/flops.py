"""Products of matrices in a traced program: the work that transfers can hide behind."""

import math
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn  # pyright: ignore[reportPrivateImportUsage]

from recipes.verify.flat import bodies


@dataclass(frozen=True)
class Named:
    """A tagged array: its shape, over all devices or (`local`, inside `shard_map`) already on one of them."""

    tag: str
    shape: tuple[int, ...]
    dtype: str
    local: bool


@dataclass
class Loop:
    """A scan over layers: its trips, tags within, and the operations of its products over all trips and devices."""

    length: int
    tags: set[str] = field(default_factory=set)
    flops: float = 0.0


@dataclass
class Work:
    """What a program computes: `flops` of its products, its loops over layers in order, its tagged arrays."""

    flops: float = 0.0
    loops: list[Loop] = field(default_factory=list)
    named: set[Named] = field(default_factory=set)


def work(program: ClosedJaxpr) -> Work:
    """Counts `2 b m n k` for each product of matrices, times the trips of the loops around it, over all devices.

    A loop over layers is the innermost scan around a tag. Element-wise operations are left out; of a `while` with
    unknown trips one is counted.
    """
    total = Work()
    _count(program.jaxpr, 1.0, False, (), total)
    total.loops = [loop for loop in total.loops if loop.tags]
    return total


def _count(jaxpr: Jaxpr, times: float, local: bool, around: tuple[Loop, ...], total: Work) -> None:
    for eqn in jaxpr.eqns:
        kind, inner_times, inner_local, inner = eqn.primitive.name, times, local, around
        if kind == "dot_general":
            flops = times * _product(eqn)
            total.flops += flops
            for loop in around:
                loop.flops += flops
        elif kind == "name":
            aval: Any = eqn.outvars[0].aval
            total.named.add(Named(eqn.params["name"], tuple(aval.shape), str(aval.dtype), local))
            if around:
                around[-1].tags.add(eqn.params["name"])
        elif kind == "scan":
            inner_times *= eqn.params["length"]
            inner = (*around, Loop(eqn.params["length"]))
            total.loops.append(inner[-1])
        elif kind == "shard_map":
            mesh = eqn.params["mesh"]
            inner_times *= math.prod(mesh.shape[axis] for axis in eqn.params["newly_manual_axes"])
            inner_local = True
        for body in bodies(eqn):
            _count(body, inner_times, inner_local, inner, total)


def _product(eqn: JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    return 2.0 * math.prod(result.shape) * math.prod(left.shape[dim] for dim in contracted)
