"""What lies in device and host memory when the most of it does, read from XLA's own account of a compiled program.

XLA writes, for a program that it compiles with the option `xla_dump_to`, which arrays share which block of memory
(buffer-assignment.txt), when each of them is needed (live-range.txt) and what made it (the program's text). No library
reads these, and a compile-only GPU client hands no `serialized_buffer_assignment_proto` out.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

DUMP_OPTIONS: dict[str, str | bool | int] = {"xla_dump_hlo_as_text": True}
HOST_COLOUR = "5"  # XLA's number of the host's memory; none or 0 is the device's, others are on its chip

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")
_COLOUR = re.compile(r"color (\d+)")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\w+)\[([\d,]*)\]"
)
_RANGE = re.compile(r"    (\S+\{[\d,]*\}):(\d+)-(\d+)")
_INSTRUCTION = re.compile(r'\s*(?:ROOT )?%(\S+) = .*?metadata=\{[^}]*?op_name="([^"]*)"')
_COMPUTATION = re.compile(r"%(\S+) \(.*\{$")
_COPY = re.compile(r"\s*(?:ROOT )?%(\S+) = \S+ (?:copy|bitcast|copy-done)\(%([^\s,)]+)")
_FUSION = re.compile(r"\s*(?:ROOT )?%(\S+) = .*?, calls=%([^\s,]+)")


@dataclass(frozen=True)
class Buffer:
    """An array in a block of memory, at `offset`; `scope` is JAX's name of what made it, such as `jit(f)/while/add`."""

    name: str
    size_bytes: int
    offset: int
    dtype: str
    dims: tuple[int, ...]
    scope: str
    first: int
    last: int


@dataclass(frozen=True)
class Peak:
    """The temporaries of one memory at the moment when they are most.

    - `buffers`: one for each array alive then, the largest first; what shares its place in full is named once.
    - `used_bytes`: what they cover; `block_bytes`: what the compiler reserves for them and all others.
    """

    buffers: tuple[Buffer, ...]
    used_bytes: int
    block_bytes: int


def read_peaks(folder: Path) -> tuple[Peak, Peak] | None:
    """`(device, host)` of the one program that was dumped into the folder; None where XLA wrote no such account."""
    paths = [sorted(folder.glob(f"*{ending}")) for ending in ("buffer-assignment.txt", "live-range.txt")]
    if not all(paths):
        return None
    assignment, ranges = paths[0][-1], dict(_ranges(paths[1][-1]))
    program = assignment.with_name(assignment.name.removesuffix("-buffer-assignment.txt") + ".txt")
    scopes = dict(_scopes(program)) if program.exists() else {}
    device: list[Peak] = []
    host: list[Peak] = []
    for size, kind, lines in _allocations(assignment):
        if "preallocated-temp" in kind:
            colour = _COLOUR.search(kind)
            peaks = {"0": device, HOST_COLOUR: host}.get(colour[1] if colour else "0")
            if peaks is not None:
                buffers = [_buffer(line, ranges, scopes) for line in lines]
                peaks.append(_peak([buffer for buffer in buffers if buffer is not None], size))
    return _joined(device), _joined(host)


def _peak(buffers: list[Buffer], block_bytes: int) -> Peak:
    moment = max((buffer.first for buffer in buffers), key=lambda t: _covered(_alive(buffers, t)), default=0)
    alive = _alive(buffers, moment)
    return Peak(tuple(_distinct(alive)), _covered(alive), block_bytes)


def _alive(buffers: Iterable[Buffer], moment: int) -> list[Buffer]:
    return [buffer for buffer in buffers if buffer.first <= moment <= buffer.last]


def _covered(buffers: Iterable[Buffer]) -> int:
    """Bytes of the block that at least one of the buffers lies in."""
    total = end = 0
    for buffer in sorted(buffers, key=lambda buffer: buffer.offset):
        last = buffer.offset + buffer.size_bytes
        total += max(0, last - max(end, buffer.offset))
        end = max(end, last)
    return total


def _distinct(buffers: Iterable[Buffer]) -> list[Buffer]:
    """One buffer a place, the largest first: what lies inside another one is the same array, or a part of it.

    The bytes of a buffer that only begins inside another count from where that one ends.
    """
    kept: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda buffer: (buffer.offset, -buffer.size_bytes, not buffer.scope)):
        end = max((other.offset + other.size_bytes for other in kept), default=0)
        missing = buffer.offset + buffer.size_bytes - max(end, buffer.offset)
        if missing > 0:
            kept.append(replace(buffer, size_bytes=missing))
        elif kept and not kept[-1].scope and buffer.size_bytes == kept[-1].size_bytes:
            kept[-1] = replace(kept[-1], scope=buffer.scope)  # a loop's own parameter has no name of its own
    return sorted(kept, key=lambda buffer: -buffer.size_bytes)


def _joined(peaks: list[Peak]) -> Peak:
    buffers = sorted((b for peak in peaks for b in peak.buffers), key=lambda buffer: -buffer.size_bytes)
    return Peak(tuple(buffers), sum(p.used_bytes for p in peaks), sum(p.block_bytes for p in peaks))


def _buffer(line: str, ranges: dict[str, tuple[int, int]], scopes: dict[str, str]) -> Buffer | None:
    found = _VALUE.match(line)
    if found is None:  # a tuple: a table of pointers
        return None
    name, index, size, offset, dtype, dims = found.groups()
    if (name + (index or "{}")) not in ranges:
        return None
    shape = tuple(int(n) for n in dims.split(",") if n)
    return Buffer(name, int(size), int(offset), dtype, shape, scopes.get(name, ""), *ranges[name + (index or "{}")])


def _allocations(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """`(size, kind, lines of its values)` of each block."""
    current: tuple[int, str, list[str]] | None = None
    with path.open() as lines:
        for line in lines:
            found = _ALLOCATION.match(line)
            if found:
                if current is not None:
                    yield current
                current = int(found[1]), found[2], []
            elif current is not None and line.startswith(" value:"):
                current[2].append(line)
    if current is not None:
        yield current


def _ranges(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    with path.open() as lines:
        for line in lines:
            found = _RANGE.match(line)
            if found:
                yield found[1], (int(found[2]), int(found[3]))


def _scopes(path: Path) -> Iterator[tuple[str, str]]:
    """The scope of each instruction; without one, that of what it copies, or of the last in its fusion that has one."""
    scopes: dict[str, str] = {}
    inside: dict[str, str] = {}
    fusions: list[tuple[str, str]] = []
    computation = ""
    with path.open() as lines:
        for line in lines:
            found, header = _INSTRUCTION.match(line), _COMPUTATION.match(line)
            if found:
                inside[computation] = scopes[found[1]] = found[2]
                yield found[1], found[2]
            elif header:
                computation = header[1]
            elif fusion := _FUSION.match(line):
                fusions.append((fusion[1], fusion[2]))
            elif (copy := _COPY.match(line)) and copy[2] in scopes:
                yield copy[1], scopes.setdefault(copy[1], scopes[copy[2]])
    yield from ((name, inside[called]) for name, called in fusions if called in inside)
