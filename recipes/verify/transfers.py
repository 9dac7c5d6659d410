"""What a compiled program moves between device and host, and what it computes where."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.verify.hlo_text import Array, Instruction, Module

_SLICES = ("dynamic-slice", "slice")
# Operations on host arrays that compute nothing.
_IDLE = frozenset(
    "parameter tuple get-tuple-element bitcast while conditional call copy copy-start copy-done custom-call "
    "optimization-barrier fusion fusion-start fusion-done async-start async-update async-done "
    "dynamic-slice dynamic-slice-start dynamic-slice-done slice slice-start slice-done "
    "dynamic-update-slice dynamic-update-slice-start dynamic-update-slice-done".split()
)
_FILLING = ("constant", "broadcast", "bitcast", "copy", "copy-start", "copy-done", "get-tuple-element", "fusion")
_LINEAR = re.compile(r'"linear":\{"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"\}')
_PLAIN = re.compile(r'"dynamic_slice_config":\{"loop_index":"\d+","byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"\}')


@dataclass(frozen=True)
class Transfer:
    """A copy between device and host.

    - `out`: to the host; `moved_bytes`: at a time; `host_bytes`: of the host array, of which that is a part.
    - `asynchronous`: the device goes on meanwhile; `backward`: it stands in the backward pass, or nothing says
      where it stands.
    - `walk`: where in the host array each step of a loop moves: `(offset, stride)` in bytes, None if not annotated.
    - `whole_state`: all of an argument of the program at once. `blank`: a fill value, not an array that was computed.
    """

    name: str
    out: bool
    moved_bytes: int
    host_bytes: int
    host_array: Array
    asynchronous: bool
    backward: bool
    walk: tuple[int, int] | None
    whole_state: bool
    blank: bool

    @property
    def steps(self) -> int:
        return self.host_bytes // self.moved_bytes


def transfers(module: Module) -> Iterator[Transfer]:
    """Every copy between device and host, once for each place that it is run from."""
    for computation, instruction in module.instructions():
        ends = _ends(module, computation, instruction)
        if ends is None:
            continue
        callers = [each for each in module.callers.get(computation, ()) if "fusion" in each.opcode or _async(each)]
        for caller in callers or [instruction]:
            yield _transfer(module, computation, instruction, caller, *ends)


def host_computations(module: Module) -> list[str]:
    """The operations that the host's processor computes, or that device code reads and writes in host memory."""
    found = []
    for computation, instruction in module.instructions():
        operands = [module.computations[computation].get(name) for name in instruction.operands]
        at_host = _single_on_host(instruction) or any(each is not None and _single_on_host(each) for each in operands)
        if instruction.opcode not in _IDLE and (instruction.on_host_processor or at_host):
            found.append(instruction.opcode)
    return found


def host_state_bytes(module: Module) -> int:
    """Bytes of the program's arguments that lie on the host or are moved there whole."""
    entry = module.computations[module.entry]
    names = {name for name, each in entry.items() if each.opcode == "parameter" and each.arrays[0].on_host}
    for instruction in entry.values():
        if instruction.opcode.startswith("copy") and _single_on_host(instruction):
            names |= {source for source in [_argument(entry, instruction)] if source is not None}
    return sum(entry[name].arrays[0].num_bytes for name in names)


def _ends(module: Module, computation: str, instruction: Instruction) -> tuple[bool, Array, Array] | None:
    """`(out, host array, moved array)` of an instruction that copies between device and host, else None."""
    opcode = instruction.opcode.removesuffix("-start")
    operands = [module.computations[computation].get(name) for name in instruction.operands]
    kinds = [each.arrays[0] if each is not None and each.arrays else None for each in operands]
    if opcode in _SLICES and kinds and kinds[0] is not None and kinds[0].on_host:
        made = instruction.arrays[len(kinds) if instruction.opcode.endswith("-start") else 0]
        return None if made.on_host else (False, kinds[0], made)
    if opcode == "dynamic-update-slice" and kinds[0] is not None and kinds[0].on_host and kinds[1] is not None:
        return None if kinds[1].on_host else (True, kinds[0], kinds[1])
    if opcode == "copy" and instruction.arrays and kinds and kinds[0] is not None:
        made, source = instruction.arrays[0], instruction.arrays[1] if "start" in instruction.opcode else kinds[0]
        if made.on_host != source.on_host:
            return (True, made, source) if made.on_host else (False, source, made)
    return None


def _transfer(
    module: Module, place: str, instruction: Instruction, caller: Instruction, out: bool, host: Array, moved: Array
) -> Transfer:
    computation, name = module.computations[place], instruction.op_name or caller.op_name
    whole = place == module.entry and instruction.opcode.startswith("copy") and not out
    return Transfer(
        name=name or instruction.name,
        out=out,
        moved_bytes=moved.num_bytes,
        host_bytes=host.num_bytes,
        host_array=host,
        asynchronous=_async(instruction) or _async(caller),
        backward=not name or "transpose(" in name,
        walk=_walk(instruction.attributes),
        whole_state=whole and _argument(computation, instruction) is not None,
        blank=out and _is_blank(computation, instruction),
    )


def _argument(entry: dict[str, Instruction], instruction: Instruction) -> str | None:
    """The argument of the program that an instruction moves, unchanged; None if it moves something else."""
    while instruction.opcode != "parameter":
        if instruction.opcode.partition("-")[0] not in ("copy", "bitcast", "optimization") or not instruction.operands:
            return None
        instruction = entry[instruction.operands[0]]
    return instruction.name


def _is_blank(computation: dict[str, Instruction], instruction: Instruction) -> bool:
    """Whether a value depends on nothing, such as the zeros that JAX fills the stacks of a loop with."""
    if instruction.opcode not in _FILLING:
        return False
    return all(name in computation and _is_blank(computation, computation[name]) for name in instruction.operands)


def _async(instruction: Instruction) -> bool:
    return instruction.opcode.endswith("-start")


def _single_on_host(instruction: Instruction) -> bool:
    return len(instruction.arrays) == 1 and instruction.arrays[0].on_host


def _walk(attributes: str) -> tuple[int, int] | None:
    match = _LINEAR.search(attributes) or _PLAIN.search(attributes)
    if match is None or match[2] == "0":
        return None
    return int(match[1]), int(match[2])
