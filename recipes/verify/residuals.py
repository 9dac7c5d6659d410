"""What a program keeps from its forward to its backward pass: every array, its tag or the line that made it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax._src import source_info_util  # no public way to the line that an equation stands for
from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]

from recipes.verify.flat import Flat, Node, bodies, flatten
from recipes.verify.policies import merged, policies_of, policies_within

_INPUT = "block input"
_LOOPS = ("scan", "while", "cond")


@dataclass(frozen=True)
class Kept:
    """An array that the forward pass makes and the backward pass reads.

    - `tag`: its name, None for one that was not named.
    - `loop`: the number of the loop over layers that stacks it, None outside; `steps`: the length of that loop.
    - `turn`: which layer of a step it belongs to, where a step takes several; outside of loops, which use of its name
      it is.
    - `place`: `device` or `host`; `shape`, `dtype`, `step_bytes`: of one step's array.
    - `in_shard_map`: it was named where arrays are the parts of one device, so that its bytes are not those of a table.
    - `reads`: operations of the backward pass that read it, in one step.
    - `operation`, `source`: what made it, and on which line. `constant`: it depends on no input of the program.
    """

    tag: str | None
    loop: int | None
    steps: int
    turn: int
    place: str
    shape: tuple[int, ...]
    dtype: str
    step_bytes: int
    in_shard_map: bool
    reads: int
    operation: str
    source: str
    constant: bool

    @property
    def num_bytes(self) -> int:
        return self.steps * self.step_bytes

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument of the program, such as weights on the host: no pass makes it."""
        return self.loop is None and self.operation == _INPUT


@dataclass(frozen=True)
class Loop:
    """A loop over layers: run forwards, and its arrays read by the backward pass.

    - `turns`: how often a step names the tag that it names first: the layers of a step, unless
      one names it twice.
    - `named`: the tags that a step names; `outputs`: those of what it carries on to the next.
    - `policy`: tag -> place, as far as the checkpoint policies of its backward pass are of jax's own and agree.
    """

    steps: int
    turns: int
    named: frozenset[str]
    outputs: frozenset[str]
    policy: Mapping[str, str]


@dataclass
class Residuals:
    """`kept`: every array; `loops`: those over layers, in order; `forward`, `backward`: the tags that each pass names.

    `policy`: what the policies of the whole program ask, as for a loop.
    """

    kept: list[Kept] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    forward: set[str] = field(default_factory=set)
    backward: set[str] = field(default_factory=set)
    policy: Mapping[str, str] = field(default_factory=dict)  # of the whole program, as of a loop


def residuals(program: ClosedJaxpr) -> Residuals:
    """What the gradients within a program keep. Loops that hold whole gradients, over micro-batches, are entered."""
    found = Residuals(policy=merged(policies_within(program.jaxpr)))
    _search(flatten(program), found)
    return found


def _search(flat: Flat, found: Residuals) -> None:
    kept = _kept_values(flat)
    loops: dict[Node, int] = {}
    for node in flat.nodes:
        names = list(_names(node))
        (found.backward if node.backward else found.forward).update(names)
        if node.name == "scan" and names and any(value in kept for value in node.outputs):
            loops[node] = len(found.loops)
            readers = [reader for value in node.outputs for reader in flat.readers.get(value, ()) if reader.backward]
            found.loops.append(_loop(node, flat.body(node), names, readers))
        elif node.name in _LOOPS and not node.backward:
            for body in bodies(node.eqn):
                _search(flatten(body), found)
    for value in kept:
        maker = flat.makers[value]
        position = maker.outputs.index(value)
        if maker in loops and _stacks(maker, position):  # else it may be the last layer's output, nothing of the loop's
            body = flat.body(maker)
            found.kept.append(_describe(flat, value, body, body.outputs[position], loops[maker]))
        else:
            found.kept.append(_describe(flat, value, flat, value, None))


def _kept_values(flat: Flat) -> list[int]:
    """The values that cross from the forward to the backward pass."""
    crossing = {
        value
        for value, readers in flat.readers.items()
        if value in flat.makers and not flat.makers[value].backward and any(reader.backward for reader in readers)
    }
    return sorted(value for value in crossing if flat.avals[value].size)


def _describe(flat: Flat, value: int, inner: Flat, made: int | None, loop: int | None) -> Kept:
    """`value` of the program is what a step of `inner`, the body of a loop or the program itself, calls `made`."""
    node, _ = inner.origin(made)
    tag = node.eqn.params["name"] if node is not None and node.name == "name" else None
    aval: Any = flat.avals[value]
    steps, shape = (1, aval.shape) if loop is None else (aval.shape[0], aval.shape[1:])
    return Kept(
        tag=tag,
        loop=loop,
        steps=steps,
        turn=_turn(inner, node, loop),
        place="host" if aval.memory_space == jax.memory.Space.Host else "device",
        shape=tuple(shape),
        dtype=str(aval.dtype),
        step_bytes=math.prod(shape) * aval.dtype.itemsize,
        in_shard_map=node is not None and node.in_shard_map,
        reads=_reads(flat, value),
        operation=_INPUT if node is None else node.name,
        source=_line(flat.makers[value] if node is None else node),
        constant=loop is None and value in flat.constants,
    )


def _reads(flat: Flat, value: int) -> int:
    """How many operations of one step of the backward pass read a value."""
    reads = 0
    for node in flat.readers.get(value, ()):
        if node.backward and node.name == "scan":
            body = flat.body(node)
            reads += sum(body.num_reads(inner) for inner, v in zip(body.inputs, node.inputs, strict=True) if v == value)
        elif node.backward and node.transparent:
            reads += sum(flat.num_reads(out) for out, v in zip(node.outputs, node.inputs, strict=True) if v == value)
        elif node.backward:
            reads += 1
    return reads


def _turn(flat: Flat, node: Node | None, loop: int | None) -> int:
    namings = [each for each in flat.nodes if each.name == "name" and not each.backward]
    if node is None or node not in flat.nodes or not namings:
        return 0
    if loop is None:
        same = [each for each in namings if each.eqn.params["name"] == node.eqn.params.get("name")]
        return same.index(node) if node in same else 0
    place = {each: position for position, each in enumerate(flat.nodes)}
    first = namings[0].eqn.params["name"]
    starts = [each for each in namings if each.eqn.params["name"] == first and place[each] <= place[node]]
    return max(0, len(starts) - 1)


def _loop(node: Node, body: Flat, names: list[str], readers: list[Node]) -> Loop:
    carried = [body.origin(value)[0] for i, value in enumerate(body.outputs) if not _stacks(node, i)]
    outputs = frozenset(maker.eqn.params["name"] for maker in carried if maker is not None and maker.name == "name")
    policies = [policy for reader in dict.fromkeys(readers) for policy in policies_of(reader.eqn)]
    return Loop(node.eqn.params["length"], names.count(names[0]), frozenset(names), outputs, merged(policies))


def _stacks(loop: Node, position: int) -> bool:
    """Whether a loop stacks an output over its steps: what it carries has the same dims within and without."""
    without, within = loop.eqn.outvars[position].aval, loop.eqn.params["jaxpr"].jaxpr.outvars[position].aval
    return without.ndim > within.ndim  # pyright: ignore[reportAttributeAccessIssue]


def _names(node: Node) -> Iterator[str]:
    """The tags that an operation names, in the loops within it too."""
    if node.name == "name":
        yield node.eqn.params["name"]
    for body in bodies(node.eqn):
        yield from _names_within(body)


def _names_within(jaxpr: Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for body in bodies(eqn):
            yield from _names_within(body)


def _line(node: Node) -> str:
    """`layers/mlp.py:31`: the innermost line outside of installed packages."""
    frames = list(source_info_util.user_frames(node.eqn.source_info.traceback))
    own = [frame for frame in frames if "site-packages" not in frame.file_name]
    if not frames:
        return ""
    frame = (own or frames)[0]
    path = Path(frame.file_name)
    return f"{'/'.join(path.parts[-2:])}:{frame.start_line}"
