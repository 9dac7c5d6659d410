"""The placement table as text: tags down, groups of equal layers across."""

from collections.abc import Iterable, Sequence

from recipes.placement.resolve import Cell, Table

_MAX_WIDTH = 110
_MANY_SEGMENTS = 8
_COMPILE_SHARE = 0.15  # what each further segment adds to a whole step: 0.10 (Llama) to 0.18 (DeepSeek), at 20


def show(table: Table) -> str:
    """The table with equal layers folded into one column, bytes of each tag in a layer, and totals by place."""
    groups = _fold(table)
    names = list(dict.fromkeys(tag for row in table.layers for tag in row))
    sizes = {tag: max(row[tag].array_bytes for row in table.layers if tag in row) for tag in names}
    label = ["placement", *names]
    size = ["a layer", *(format_bytes(sizes[tag]) if sizes[tag] else "-" for tag in names)]
    columns = [
        [layers_word(numbers), *(_word(table.layers[numbers[0]].get(tag)) for tag in names)] for numbers in groups
    ]
    blocks = [align([label, size, *part]) for part in _parts(columns, _MAX_WIDTH - _width(label) - _width(size) - 4)]
    segments = f"{table.num_segments} segment{'s' if table.num_segments > 1 else ''}"
    totals = ", ".join(f"{format_bytes(table.place_bytes(place))} on {place}" for place in ("device", "host"))
    lines = ["\n\n".join(blocks), f"{len(table.layers)} layers in {segments}; saved activations: {totals}"]
    return "\n".join([*lines, *_warning(table)])


def _warning(table: Table) -> list[str]:
    """What many segments cost, and the pattern that would make few of them."""
    if table.num_segments <= _MANY_SEGMENTS:
        return []
    times = 1 + _COMPILE_SHARE * (table.num_segments - 1)
    line = f"note: {table.num_segments} segments take roughly {times:.0f} times as long to compile as one"
    fewest = min(table.segments_by_group, key=lambda group: (table.segments_by_group[group], group))
    if 2 * table.segments_by_group[fewest] > table.num_segments:
        return [line]
    return [f"{line}; placement.group={fewest} would make {table.segments_by_group[fewest]}"]


def explain(table: Table) -> str:
    """One line for each tag and entry: the layers it decided and the place it gave them."""
    decided: dict[tuple[str, str, str], list[int]] = {}
    for number, row in enumerate(table.layers):
        for tag, cell in row.items():
            decided.setdefault((tag, cell.place or "-", cell.reason), []).append(number)
    rows = [[tag, layers_word(numbers), place, reason] for (tag, place, reason), numbers in decided.items()]
    rows.sort(key=lambda row: list(dict.fromkeys(tag for tag, _, _ in decided)).index(row[0]))
    return align([list(column) for column in zip(["tag", "layers", "place", "decided by"], *rows, strict=True)])


def format_bytes(count: float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _fold(table: Table) -> list[list[int]]:
    """Numbers of the layers with equal tags and places, in order of the first."""
    groups: dict[tuple, list[int]] = {}
    for number, row in enumerate(table.layers):
        key = tuple((tag, cell.place, cell.array_bytes) for tag, cell in row.items())
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def layers_word(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2+5`, the way a recipe names layers."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return "+".join(parts) if len(parts) <= 4 else "+".join(parts[:3]) + f"+...({len(numbers)})"


def _word(cell: Cell | None) -> str:
    return "" if cell is None else cell.place or "-"


def _width(column: Iterable[str]) -> int:
    return max(map(len, column))


def _parts(columns: list[list[str]], room: int) -> list[list[list[str]]]:
    """Columns in as many blocks as the width needs."""
    parts: list[list[list[str]]] = [[]]
    used = 0
    for column in columns:
        used += _width(column) + 2
        if used > room and parts[-1]:
            parts.append([])
            used = _width(column) + 2
        parts[-1].append(column)
    return parts


def align(columns: list[list[str]]) -> str:
    """Columns of words as lines of text."""
    widths = [_width(column) for column in columns]
    lines = [
        "  ".join(word.ljust(w) for word, w in zip(row, widths, strict=True)) for row in zip(*columns, strict=True)
    ]
    return "\n".join(line.rstrip() for line in lines)
