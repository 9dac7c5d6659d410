"""A jaxpr without its calls: one list of operations, in which a value is followed through jit and checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]

# Operations whose body stands for them: same inputs, same outputs.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
_SHARD_MAP = "shard_map"
# Operations through which a value passes unchanged, on its way to another memory or to the end of a loop's body.
_TRANSPARENT = ("device_put", "reduce_precision", "optimization_barrier", "name", "sharding_constraint")


@dataclass(frozen=True, eq=False)
class Node:
    """One operation.

    - `inputs`: the values that it reads, None for a constant; `outputs`: those that it makes.
    - `backward`: it belongs to the backward pass; `in_shard_map`: arrays are the parts of one device there.
    """

    eqn: JaxprEqn
    inputs: tuple["int | None", ...]
    outputs: tuple[int, ...]
    backward: bool
    in_shard_map: bool

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def transparent(self) -> bool:
        """Whether values pass through it unchanged."""
        return self.name in _TRANSPARENT


@dataclass
class Flat:
    """The operations of a jaxpr in order; values are numbers. `inputs` and `outputs` are those of the jaxpr."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list["int | None"] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    _bodies: dict[Node, "Flat"] = field(default_factory=dict)

    def body(self, loop: Node) -> "Flat":
        """What a step of a `scan` does."""
        if loop not in self._bodies:
            self._bodies[loop] = flatten(loop.eqn.params["jaxpr"])
        return self._bodies[loop]

    @cached_property
    def makers(self) -> dict[int, Node]:
        """Value -> the operation that makes it; inputs have none."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def readers(self) -> dict[int, list[Node]]:
        """Value -> the operations that read it."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                if value is not None:
                    found.setdefault(value, []).append(node)
        return found

    @cached_property
    def constants(self) -> set[int]:
        """Values that depend on no input."""
        found: set[int] = set()
        for node in self.nodes:
            if all(value is None or value in found for value in node.inputs):
                found.update(node.outputs)
        return found

    def origin(self, value: "int | None") -> "tuple[Node | None, int | None]":
        """What a value is, unchanged: the naming or making operation, and its own number; of an input only that."""
        while value is not None and value in self.makers:
            node = self.makers[value]
            if node.name == "name" or not node.transparent:
                return node, value
            value = node.inputs[node.outputs.index(value)]
        return None, value

    def num_reads(self, value: int) -> int:
        """How many operations read a value, counting those that read it once it was moved."""
        reads = 0
        for node in self.readers.get(value, ()):
            if node.transparent:
                reads += sum(
                    self.num_reads(out) for out, v in zip(node.outputs, node.inputs, strict=True) if v == value
                )
            else:
                reads += 1
        return reads + self.outputs.count(value)


def flatten(jaxpr: Jaxpr | ClosedJaxpr) -> Flat:
    """The operations of a jaxpr, calls replaced by what they do; loops and branches stay one operation each."""
    flat = Flat()
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    known: dict[Var, int | None] = {var: _new(flat, var) for var in jaxpr.constvars}
    flat.inputs = [_new(flat, var) for var in jaxpr.invars]
    known |= dict(zip(jaxpr.invars, flat.inputs, strict=True))
    _walk(flat, jaxpr, known, backward=False, in_shard_map=False)
    flat.outputs = [_value(known, var) for var in jaxpr.outvars]
    return flat


def _walk(flat: Flat, jaxpr: Jaxpr, known: dict[Var, int | None], backward: bool, in_shard_map: bool) -> None:
    for eqn in jaxpr.eqns:
        back = backward or "transpose(" in str(eqn.source_info.name_stack)
        inputs = tuple(_value(known, var) for var in eqn.invars)
        inner = next(bodies(eqn), None)
        if inner is not None and eqn.primitive.name in (*_CALLS, _SHARD_MAP) and len(inner.invars) == len(inputs):
            within = dict(zip(inner.invars, inputs, strict=True)) | {var: _new(flat, var) for var in inner.constvars}
            _walk(flat, inner, within, back, in_shard_map or eqn.primitive.name == _SHARD_MAP)
            known |= {out: _value(within, var) for out, var in zip(eqn.outvars, inner.outvars, strict=True)}
        else:
            outputs = tuple(_new(flat, var) for var in eqn.outvars)
            known |= dict(zip(eqn.outvars, outputs, strict=True))
            flat.nodes.append(Node(eqn, inputs, outputs, back, in_shard_map))


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation holds."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _new(flat: Flat, var: Any) -> int:
    flat.avals.append(var.aval)
    return len(flat.avals) - 1


def _value(known: dict[Var, int | None], var: Any) -> int | None:
    return None if isinstance(var, Literal) else known[var]
