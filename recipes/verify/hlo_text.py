"""The text of an optimised HLO module as instructions, for CUDA and TPU alike."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

HOST_SPACE = 5  # XLA's memory space of pinned host memory, `S(5)` in a layout
_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "token": 0, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=(?:\{([^}]*)\}|(%?[\w.\-]+))")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Array:
    """One array of a type: `f32[4,128]{1,0:S(5)}` has dims (4, 128) and lies on the host."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool

    @property
    def num_bytes(self) -> int:
        bits = _ITEM_BITS.get(self.dtype) or int(re.sub(r"\D*(\d+).*", r"\1", self.dtype) or 8)
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True)
class Instruction:
    """`[ROOT] %name = type opcode(operands), attributes`; `arrays` are those of its type, in order."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        found = (name for several, one in _CALLED.findall(self.attributes) for name in (several or one).split(", "))
        return tuple(name.lstrip("%") for name in found)

    @property
    def op_name(self) -> str:
        """Where in the program it comes from, such as `jit(step)/transpose(jvp())/while/body/dynamic_slice`."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def on_host_processor(self) -> bool:
        """Whether the compiler has the host's processor compute it."""
        return '_xla_compute_type="host"' in self.attributes or 'async_execution_thread="host"' in self.attributes


@dataclass
class Module:
    """Computation -> its instructions by name; `entry` is the one that a call of the program runs."""

    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    entry: str = ""

    @cached_property
    def callers(self) -> dict[str, list[Instruction]]:
        """Computation -> the instructions that run it."""
        found: dict[str, list[Instruction]] = {}
        for _, instruction in self.instructions():
            for name in instruction.called:
                found.setdefault(name, []).append(instruction)
        return found

    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """Every instruction, with the computation that it stands in."""
        for name, instructions in self.computations.items():
            for instruction in instructions.values():
                yield name, instruction


def parse(text: str) -> Module:
    """Reads what `compiled.as_text()` gives. Raises ValueError if there is no entry computation."""
    module, current = Module(), None
    for line in text.splitlines():
        if current is None:
            if match := _COMPUTATION.match(line):
                current = module.computations.setdefault(match[2], {})
                module.entry = match[2] if match[1] else module.entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            current[match[2]] = _instruction(match[2], match[3], root=bool(match[1]))
    if not module.entry:
        raise ValueError("this is no HLO module: it has no entry computation")
    return module


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = re.findall(r"%([\w.\-]+)", rest[opening:closing])
    return Instruction(name, arrays(kind), rest[:opening], tuple(operands), rest[closing + 1 :], root)


def arrays(kind: str) -> tuple[Array, ...]:
    """The arrays of a type, of a tuple's members too."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(kind):
        space = _SPACE.search(layout)
        on_host = space is not None and int(space[1]) == HOST_SPACE
        found.append(Array(dtype, tuple(int(n) for n in dims.split(",") if n), on_host))
    return tuple(found)


def _closing(text: str, opening: int) -> int:
    """Where the bracket closes that opens at a position."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    raise ValueError(f"a bracket does not close: {text[:80]}")
