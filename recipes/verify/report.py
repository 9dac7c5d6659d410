"""The checks as text for a terminal of 100 columns, worst news first, and as JSON."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from recipes.placement.show import align, format_bytes, layers_word

if TYPE_CHECKING:
    from recipes.verify.arguments import StateArray
    from recipes.verify.comparison import Comparison, Leaf
    from recipes.verify.gradients import Gradients
    from recipes.verify.hlo import Compiled
    from recipes.verify.proof import Proof
    from recipes.verify.residuals import Kept
    from recipes.verify.tracing import Cell, Trace

WIDTH = 100
_MOST_UNTAGGED, _MOST_LEAVES = 8, 5


def show_trace(trace: "Trace") -> str:
    """A line for each tag and layers that fare alike; then totals, and the largest arrays without a tag."""
    lines = [f"! {problem}" for problem in trace.problems]
    lines += _cells(trace.cells)
    lines.append(f"{trace.found} of {trace.asked} placements as asked; {_totals(trace)}; in {trace.trace_s:.1f} s")
    if trace.untagged:
        lines += ["", *_untagged(trace.untagged)]
    return "\n".join(clip(line) for line in lines)


def trace_json(trace: "Trace") -> dict[str, Any]:
    """`ok`, counts, bytes by place and layer, and every cell and untagged array."""
    layers = sorted({cell.layer for cell in trace.cells})
    return {
        "ok": trace.ok,
        "asked": trace.asked,
        "found": trace.found,
        "untagged_bytes": trace.untagged_bytes,
        "bytes": {place: trace.place_bytes(place) for place in ("device", "host")},
        "layers": [{place: trace.place_bytes(place, layer) for place in ("device", "host")} for layer in layers],
        "problems": list(trace.problems),
        "cells": [dataclasses.asdict(cell) for cell in trace.cells],
        "untagged": [dataclasses.asdict(each) | {"num_bytes": each.num_bytes} for each in trace.untagged],
        "trace_s": trace.trace_s,
    }


def show_compiled(compiled: "Compiled") -> str:
    """What is wrong first; arrays that fare alike in one line; totals."""
    lines = [f"! {problem}" for problem in compiled.problems] + _misplaced(compiled.state)
    alike: dict[tuple, list[int]] = {}
    for each in compiled.arrays:
        alike.setdefault((each.tag, each.step_bytes, each.problem), []).append(each.layers)
    rows = [["on the host", "layers", "a layer", ""]]
    for (tag, size, problem), layers in sorted(alike.items(), key=lambda item: item[0][2] is None):
        rows.append([tag, str(sum(layers)), format_bytes(size), f"! {problem}" if problem else "out and back"])
    if compiled.arrays:
        lines += align([list(column) for column in zip(*rows, strict=True)]).splitlines()
    lines += [f"note: {note}" for note in compiled.notes]
    lines.append(
        f"{compiled.found} of {compiled.asked} placements on the host are moved out and back, "
        f"{format_bytes(compiled.host_bytes)} a device; compiled in {compiled.compile_s:.1f} s"
    )
    lines += [state_line(compiled.state)] if compiled.state else []
    return "\n".join(clip(line) for line in lines)


def state_line(state: Sequence["StateArray"]) -> str:
    """`state: 93 of 93 arrays where asked, 80 of them on the host`."""
    hosted = sum(each.asked == "host" for each in state)
    return f"state: {sum(each.ok for each in state)} of {len(state)} arrays where asked, {hosted} on the host"


def _misplaced(state: Iterable["StateArray"]) -> list[str]:
    """A line for each problem, with the first array that has it."""
    alike: dict[tuple, list[str]] = {}
    for each in state:
        if not each.ok:
            alike.setdefault((each.asked, each.problem), []).append(each.name)
    more = {key: f" and {len(names) - 1} more" if names[1:] else "" for key, names in alike.items()}
    return [f"! {names[0]}{more[key]}, asked on {key[0]}: {key[1]}" for key, names in alike.items()]


def clip(line: str) -> str:
    """A line that fits the terminal."""
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _cells(cells: Iterable["Cell"]) -> list[str]:
    alike: dict[tuple, list[int]] = {}
    for cell in cells:
        if cell.asked is None and cell.found == "remat" and cell.problem is None:
            continue  # no place of it has an effect
        key = (cell.tag, cell.asked or "-", cell.found, cell.found_bytes, cell.reads, cell.problem or "")
        alike.setdefault(key, []).append(cell.layer)
    if not alike:
        return []
    rows = [["tag", "layers", "asked", "found", "a layer", "reads", ""]]
    for (tag, asked, found, size, reads, problem), layers in sorted(alike.items(), key=lambda item: not item[0][-1]):
        figures = [format_bytes(size), str(reads)] if found != "remat" else ["", ""]
        rows.append([tag, layers_word(layers), asked, found, *figures, problem and f"! {problem}"])
    return align([list(column) for column in zip(*rows, strict=True)]).splitlines()


def _totals(trace: "Trace") -> str:
    return ", ".join(f"{format_bytes(trace.place_bytes(place))} on {place}" for place in ("device", "host"))


def _untagged(kept: Sequence["Kept"]) -> list[str]:
    """Arrays of one line and shape are one row."""
    alike: dict[tuple, list[int]] = {}
    for each in kept:
        shape = f"{each.dtype}[{','.join(map(str, each.shape))}]" + (
            f" x {each.steps}" if each.loop is not None else ""
        )
        alike.setdefault((shape, each.operation, each.source), []).append(each.num_bytes)
    ordered = sorted(alike.items(), key=lambda item: -sum(item[1]))
    rows = [["kept without a tag", "array", "made by", "at"]]
    for (shape, operation, source), sizes in ordered[:_MOST_UNTAGGED]:
        times = f" x {len(sizes)}" if len(sizes) > 1 else ""
        rows.append([format_bytes(sum(sizes)), shape + times, operation, source])
    lines = align([list(column) for column in zip(*rows, strict=True)]).splitlines()
    if len(ordered) > _MOST_UNTAGGED:
        rest = sum(sum(sizes) for _, sizes in ordered[_MOST_UNTAGGED:])
        lines.append(f"{format_bytes(rest)} in {len(ordered) - _MOST_UNTAGGED} more")
    return lines


def show_gradients(gradients: "Gradients") -> str:
    """The leaves that differ too much first, then each comparison in a line."""
    lines = _misplaced(gradients.kinds)
    for against, comparison in _comparisons(gradients):
        lines += [f"! {against}: {_leaf(leaf)}" for leaf in comparison.wrong[:_MOST_LEAVES]]
        if len(comparison.wrong) > _MOST_LEAVES:
            lines.append(f"! {against}: and {len(comparison.wrong) - _MOST_LEAVES} more arrays")
    rows = [["numbers", "arrays", "equal", "worst", "allowed", "where"]]
    for against, comparison in _comparisons(gradients):
        equal = sum(leaf.equal for leaf in comparison.leaves)
        figures = [str(len(comparison.leaves)), str(equal), f"{comparison.worst:.1e}", f"{comparison.tolerance:g}"]
        rows.append([against, *figures, comparison.worst_leaf])
    lines += align([list(column) for column in zip(*rows, strict=True)]).splitlines()
    lines.append(f"with {gradients.layers} layers and {gradients.sequence} tokens a sequence")
    lines += [f"{state_line(gradients.kinds)}, at the start and after each step"] if gradients.kinds else []
    return "\n".join(clip(line) for line in lines)


def gradients_json(gradients: "Gradients") -> dict[str, Any]:
    """`ok`, `worst`, `worst_leaf`, and every comparison with every leaf."""

    def plain(comparison: "Comparison") -> dict[str, Any]:
        leaves = [
            dataclasses.asdict(leaf) | {"worst": _number(leaf.worst), "experts": list(map(_number, leaf.experts))}
            for leaf in comparison.leaves
        ]
        worst, tolerance = _number(comparison.worst), comparison.tolerance
        return {"ok": comparison.ok, "worst": worst, "tolerance": tolerance, "leaves": leaves}

    return {
        "ok": gradients.ok,
        "worst": _number(gradients.worst),
        "worst_leaf": gradients.worst_leaf,
        "layers": gradients.layers,
        "sequence": gradients.sequence,
        "twin": plain(gradients.twin),
        "device": plain(gradients.device),
        "states": [plain(each) for each in gradients.states],
        "kinds": [dataclasses.asdict(each) for each in gradients.kinds],
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "inf"


def _comparisons(gradients: "Gradients") -> list[tuple[str, "Comparison"]]:
    states = [(f"state after step {number}", each) for number, each in enumerate(gradients.states, start=1)]
    return [("gradients", gradients.twin), *states, ("gradients, all on device", gradients.device)]


def _leaf(leaf: "Leaf") -> str:
    expert = "" if leaf.expert is None else f", expert {leaf.expert}"
    return f"{leaf.name}{expert} by {leaf.worst:.1e} at {list(leaf.where)}"


def show_proof(proof: "Proof") -> str:
    """Each check, the failed ones first, and in the last line what holds or what does not."""
    parts = sorted(proof.checks.items(), key=lambda item: item[1].ok)
    blocks = [f"{'ok' if report.ok else 'FAILED'}: {name}\n{report}" for name, report in parts]
    return "\n\n".join([*blocks, clip(_verdict(proof))])


def _verdict(proof: "Proof") -> str:
    trace, compiled, gradients = proof.trace, proof.compiled, proof.gradients
    numbers = "gradients not checked" if gradients is None else f"gradients equal (worst {gradients.worst:.1f})"
    state = compiled.state if compiled is not None else gradients.kinds if gradients is not None else ()
    if proof.ok and trace is not None:
        hosted = f"{state_line(state)}, " if any(each.asked == "host" for each in state) else ""
        return f"proved: {trace.found} of {trace.asked} placements, {hosted}{numbers}"
    failed = []
    if not proof.versions.ok:
        failed.append("this compiler is known to give wrong gradients")
    if trace is not None and not trace.ok:
        failed.append(f"{trace.found} of {trace.asked} placements in the trace")
    if compiled is not None and not compiled.ok:
        failed.append(f"{compiled.found} of {compiled.asked} placements in the compiled program")
        failed += [state_line(compiled.state)] if not all(each.ok for each in compiled.state) else []
        failed += compiled.problems[:1]
    if gradients is not None and not all(each.ok for each in gradients.kinds):
        failed.append(state_line(gradients.kinds))
    if gradients is not None and gradients.first_wrong is not None:
        failed.append(f"gradients differ (worst {gradients.worst:.1e} in {gradients.worst_leaf})")
    return f"failed: {'; '.join(failed)}"
