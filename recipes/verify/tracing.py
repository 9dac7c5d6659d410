"""The first check, without compiling: does each named activation of a program end up where it was asked to?"""

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from recipes.placement.resolve import Table
from recipes.verify.residuals import Kept, Loop, Residuals, residuals

Asked = Table | Mapping[str, str] | Sequence[Mapping[str, str]] | None


@dataclass(frozen=True)
class Cell:
    """One tag of one layer.

    - `asked`: its place, None if nothing says: any will do. `found`: `device`, `host`, or `remat` where it is not kept.
    - `asked_bytes` (None: unknown), `found_bytes`; `reads`: operations of the layer's backward pass that read it.
    - `problem`: what is wrong, None if nothing is.
    """

    layer: int
    tag: str
    asked: str | None
    found: str
    asked_bytes: int | None
    found_bytes: int
    reads: int
    problem: str | None = None


@dataclass(frozen=True)
class Trace:
    """What a program keeps between its passes, cell by cell, and what it keeps without being asked.

    - `cells`: in order of layers; `kept`: every array, those of all steps of a loop as one.
    - `problems`: what is wrong with the program as a whole.
    """

    cells: tuple[Cell, ...]
    kept: tuple[Kept, ...]
    problems: tuple[str, ...]
    trace_s: float

    @property
    def ok(self) -> bool:
        return not self.problems and all(cell.problem is None for cell in self.cells)

    @property
    def asked(self) -> int:
        """How many cells were asked for."""
        return sum(cell.asked is not None for cell in self.cells)

    @property
    def found(self) -> int:
        """How many of these are as asked."""
        return sum(cell.asked is not None and cell.problem is None for cell in self.cells)

    @property
    def untagged(self) -> list[Kept]:
        """The arrays without a tag, largest first."""
        return sorted((each for each in self.kept if each.tag is None), key=lambda each: -each.num_bytes)

    @property
    def untagged_bytes(self) -> int:
        return sum(each.num_bytes for each in self.untagged)

    def place_bytes(self, place: str, layer: int | None = None) -> int:
        """Bytes of the tagged arrays on a place, of one layer or of all."""
        cells = (cell for cell in self.cells if cell.found == place and layer in (None, cell.layer))
        return sum(cell.found_bytes for cell in cells)

    def __str__(self) -> str:
        from recipes.verify.report import show_trace

        return show_trace(self)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, maps and numbers."""
        from recipes.verify.report import trace_json

        return trace_json(self)


def trace(fn: Callable, *args: Any, asked: Asked = None) -> Trace:
    """Traces `fn(*args)`, a function that holds gradients such as a train step, and looks at what these keep.

    Nothing is compiled or computed: `args` may be `jax.ShapeDtypeStruct`s. `asked` is a `recipes.resolve` table; or tag
    -> place for every layer, or a list of these, one a layer; tags that it leaves out are to be recomputed. Without it
    the checkpoint policies within the program say what was asked, where they are those of `jax.checkpoint_policies`.

    Layers are the steps of loops (`jax.lax.scan`) that the backward pass runs again, numbered through the program; in a
    program without such loops the uses of a tag, in order. Of arrays within a `shard_map` bytes are not compared.
    """
    start = time.perf_counter()
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    return judge(residuals(jitted.trace(*args).jaxpr), asked, start)


def judge(found: Residuals, asked: Asked, start: float | None = None) -> Trace:
    """Compares what a program keeps with what was asked."""
    start = time.perf_counter() if start is None else start
    turns, problems = _turns(found.loops, asked)
    kept = _by_layer(found, turns)
    rows = _asked_rows(found, asked, turns, kept)
    cells = [
        _judged(found, layer, tag, row.get(tag), kept.get((layer, tag), []))
        for layer, row in enumerate(rows)
        for tag in dict.fromkeys([*row, *(name for number, name in kept if number == layer)])
    ]
    return Trace(tuple(cells), tuple(found.kept), tuple(problems), time.perf_counter() - start)


@dataclass(frozen=True)
class _Wish:
    """What one cell was asked for; without bytes, its place is all that is known."""

    place: str | None
    num_bytes: int | None = None


def _turns(loops: Sequence[Loop], asked: Asked) -> tuple[list[int], list[str]]:
    """How many layers a step of each loop takes, and what is wrong with their sum."""
    single = [1] * len(loops)
    if asked is None or isinstance(asked, Mapping):
        return single, []
    count = len(asked.layers) if isinstance(asked, Table) else len(asked)
    several = [loop.turns for loop in loops]
    for turns in (single, several):
        if sum(loop.steps * each for loop, each in zip(loops, turns, strict=True)) == count:
            return turns, []
    if not loops and not isinstance(asked, Table):
        return [], []
    steps = " + ".join(str(loop.steps) for loop in loops) or "no"
    return single, [f"the program has {steps} layers in loops that a backward pass reads, asked were {count}"]


def _by_layer(found: Residuals, turns: Sequence[int]) -> dict[tuple[int, str], list[Kept]]:
    """`(layer, tag)` -> the arrays kept of it."""
    first = [0]
    for loop, each in zip(found.loops, turns, strict=True):
        first.append(first[-1] + loop.steps * each)
    layers: dict[tuple[int, str], list[Kept]] = {}
    for each in found.kept:
        if each.tag is None:
            continue
        if each.loop is None:
            numbers = [first[-1] + each.turn]
        else:
            start, step = first[each.loop], turns[each.loop]
            numbers = [start + number * step + each.turn % step for number in range(each.steps)]
        for number in numbers:
            layers.setdefault((number, each.tag), []).append(each)
    return dict(sorted(layers.items(), key=lambda item: item[0][0]))


def _asked_rows(
    found: Residuals, asked: Asked, turns: Sequence[int], kept: Mapping[tuple[int, str], Any]
) -> list[dict[str, _Wish]]:
    """For each layer tag -> what was asked."""
    if isinstance(asked, Table):
        return [{tag: _Wish(cell.place, cell.array_bytes) for tag, cell in row.items()} for row in asked.layers]
    if asked is not None and not isinstance(asked, Mapping):
        return [{tag: _Wish(place) for tag, place in row.items()} for row in asked]
    policies = [loop.policy for loop, step in zip(found.loops, turns, strict=True) for _ in range(loop.steps * step)]
    outside = max((layer for layer, _ in kept), default=-1) + 1 - len(policies)
    policies += [found.policy] * (max(0, outside) if policies else max(1, outside))
    rows = policies if asked is None else [asked] * len(policies)
    return [{tag: _Wish(place) for tag, place in row.items()} for row in rows]


def _judged(found: Residuals, layer: int, tag: str, wish: _Wish | None, kept: Sequence[Kept]) -> Cell:
    place = "+".join(sorted({each.place for each in kept})) or "remat"
    size, reads = sum(each.step_bytes for each in kept), sum(each.reads for each in kept)
    asked, asked_bytes = (None, None) if wish is None else (wish.place, wish.num_bytes)
    problem = None
    if asked in ("device", "host") and not kept:
        problem = _why_not_kept(found, tag)
    elif place != (asked or "remat"):
        problem = f"is on {place}" if asked else f"is kept on {place}, not asked"
    elif kept and asked_bytes not in (None, size) and not any(each.in_shard_map for each in kept):
        problem = f"{size} bytes, asked were {asked_bytes}"
    if place == "remat":
        asked_bytes = asked_bytes if asked in ("device", "host") else None
    return Cell(layer, tag, asked, place, asked_bytes, size, reads, problem)


def _why_not_kept(found: Residuals, tag: str) -> str:
    if tag not in found.forward | found.backward:
        near = difflib.get_close_matches(tag, sorted(found.forward), n=1)
        return "nothing has this name" + (f"; did you mean {near[0]}?" if near else "")
    if any(tag in loop.outputs for loop in found.loops):
        return "is the output of the layer, kept as the next one's input: name the input instead"
    if tag in found.backward:
        return "is computed again: no policy keeps it"
    return "no operation of the backward pass reads it"
