"""A placement resolved against a model: the table of layers x tags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from layers.tag import Tag, tags
from recipes.placement.effect import DEFAULT_EXAMPLE, savable, stacks
from recipes.placement.layer_keys import layer_numbers
from recipes.placement.segments import PlacedStack, map_stacks, place_stack, runs_of
from recipes.placement.settle import check_parts, places_in_model, settled
from recipes.placement.spec import Placement
from recipes.placement.state import StatePlacement
from recipes.sharding.rules import constrain
from recipes.sharding.spread import spread
from zoo.checks import ConfigError


class NoEffect(ConfigError):
    """A cell is named whose place has no effect."""


_GROUPS = (1, 2, 3, 4)  # tried, so that a table of many segments can say which pattern would make few


@dataclass(frozen=True)
class Cell:
    """One tag of one layer: its place (None: no place has an effect), the entry that decided, bytes of the array."""

    place: str | None
    reason: str
    array_bytes: int


@dataclass(frozen=True)
class Table:
    """Layers x tags -> cell, and how many segments the step runs. `print(table)` folds equal layers.

    - `placement`: what was resolved; `labels`: what else keeps layers apart (`apart`), one entry a layer.
    - `segments_by_group`: the number of segments that `placement.group` from 1 to 4 would make.
    """

    layers: tuple[dict[str, Cell], ...]
    num_segments: int
    placement: Placement
    labels: tuple[tuple, ...]
    segments_by_group: Mapping[int, int]

    def rows(self) -> list[dict[str, str]]:
        """Tag -> place of each layer, cells without effect left out."""
        return [{tag: cell.place for tag, cell in row.items() if cell.place is not None} for row in self.layers]

    def place_bytes(self, place: str) -> int:
        """Bytes of the activations that the step keeps on a place from the forward to the backward pass."""
        return sum(cell.array_bytes for row in self.layers for cell in row.values() if cell.place == place)

    def __str__(self) -> str:
        from recipes.placement.show import show

        return show(self)

    def explain(self) -> str:
        """Which entry of the recipe decided each cell."""
        from recipes.placement.show import explain

        return explain(self)


def resolve(
    placement: Placement, model: PyTree, example: Sequence[Any] = DEFAULT_EXAMPLE, *, apart: PyTree = None
) -> Table:
    """The table of a placement on a canonical model (arrays or `ShapeDtypeStruct`s), called as `model(*example)`.

    The example's shapes give the bytes. Layers for which a mask `apart` of the model's structure differs share no
    segment (see `recipes.canonical_mask`). Raises ConfigError for a tag or layer that the model has not, entries that
    contradict each other, and entries that cannot have an effect, saying what to write instead.
    """
    blocks = [block for stack in stacks(model) for block in stack.blocks]
    known = [{tag.name: tag for tag in tags(block)} for block in blocks]
    if not blocks:
        raise ConfigError("model", type(model).__name__, "has no layers.Stack whose layers could be placed")
    sizes = savable(model, example)
    entries = _Entries.read(placement, known)
    table = [_row(layer, known[layer], sizes[layer], entries, placement.default) for layer in range(len(blocks))]
    places = [tuple((tag, cell.place) for tag, cell in row.items()) for row in table]
    labels = _labels(apart, placement.state, len(blocks))
    for kind in ("params", "master", "gradients"):  # the optimizer's moments are known to `init_state`
        check_parts(model, kind, placement.state)
    kinds = list(zip(places, labels, strict=True))
    segments = {group: _num_segments(model, kinds, group) for group in {placement.group, *_GROUPS}}
    return Table(tuple(table), segments[placement.group], placement, labels, segments)


def _labels(apart: PyTree, state: StatePlacement, num_layers: int) -> tuple[tuple, ...]:
    rows = [state.row(layer, num_layers) for layer in range(num_layers)]
    if apart is None:
        return tuple(rows)
    blocks = [block for stack in stacks(apart) for block in stack.blocks]
    if len(blocks) != num_layers:
        raise ValueError(f"a mask must have the structure of the model: {num_layers} layers, not {len(blocks)}")
    masks = (tuple(jax.tree.leaves(block, is_leaf=lambda leaf: leaf is None)) for block in blocks)
    return tuple(mask + row for mask, row in zip(masks, rows, strict=True))


def _num_segments(model: PyTree, kinds: Sequence[Any], group: int) -> int:
    segments, first = 0, 0
    for stack in stacks(model):
        last = first + len(stack.blocks)
        segments += len(runs_of(stack.blocks, kinds[first:last], group))
        first = last
    return segments


def place(
    model: PyTree,
    placement: Placement,
    mesh: Mesh | None = None,
    *,
    table: Table | None = None,
    apart: PyTree = None,
    expert_bound: float = 2.0,
) -> PyTree:
    """The model with its blocks stacked by segments; same call, each tag on its place in the backward pass.

    Donates its input: the arrays of the blocks are deleted once stacked. `recipes.unplace` gives the canonical model
    back. `apart` is what `resolve` takes; a `table` spares resolving again. On a `mesh` arrays are split as
    `recipes.sharding.rules` says, and experts spread with `expert_bound` (`recipes.sharding.experts.spread_experts`).
    Raises ConfigError as `resolve` does, and if the mesh does not divide an array, and ValueError for a table of
    something else.
    """
    if table is None:
        table = resolve(placement, model, apart=apart)
    elif apart is not None or table.placement != placement:
        raise ValueError("the table is that of another placement; `apart` goes to resolve, which makes the table")
    rows = list(zip(table.rows(), table.labels, strict=True))
    first = 0

    def change(stack: Any) -> PlacedStack:
        nonlocal first
        start, first = first, first + len(stack.blocks)
        return place_stack(stack, rows[start:first], start, placement.group, mesh, placement.state)

    placed = map_stacks(change, model)
    if mesh is not None:
        placed = constrain(spread(placed, mesh, expert_bound), mesh)
    return settled(placed, places_in_model(placed))


@dataclass(frozen=True)
class _Entries:
    """What a recipe says explicitly: tag -> place, and for each layer tag -> (place, key, how many layers it names)."""

    activations: Mapping[str, str]
    layers: Sequence[Mapping[str, tuple[str, str, int]]]

    @classmethod
    def read(cls, placement: Placement, known: Sequence[Mapping[str, Tag]]) -> "_Entries":
        everywhere = list(dict.fromkeys(tag for row in known for tag in row))
        for tag, place in placement.activations.items():
            if tag not in everywhere:
                raise ConfigError(f"placement.activations.{tag}", place, f"no tag {tag}", allowed=everywhere, name=tag)
        layers: list[dict[str, tuple[str, str, int]]] = [{} for _ in known]
        for key, cells in placement.layers.items():
            numbers = layer_numbers(key, len(known))
            for tag, place in cells.items():
                for layer in sorted(numbers):
                    if tag not in known[layer]:
                        problem = f"layer {layer} has no tag {tag}"
                        allowed = known[layer] if tag in everywhere else everywhere
                        raise ConfigError(f"placement.layers.{key}.{tag}", place, problem, allowed=allowed, name=tag)
                    old = layers[layer].get(tag)
                    if old is not None and old[2] == len(numbers) and old[0] != place:
                        problem = f"layer {layer} is also named by {old[1]}, which says {old[0]}"
                        raise ConfigError(f"placement.layers.{key}.{tag}", place, problem)
                    if old is None or len(numbers) < old[2]:
                        layers[layer][tag] = (place, key, len(numbers))
        return cls(placement.activations, layers)

    def find(self, layer: int, tag: str) -> tuple[str, str] | None:
        """`(place, key)` of the entry that decides a cell, None if only the default speaks."""
        if tag in self.layers[layer]:
            place, key, _ = self.layers[layer][tag]
            return place, f"placement.layers.{key}.{tag}"
        if tag in self.activations:
            return self.activations[tag], f"placement.activations.{tag}"
        return None


def _row(
    layer: int, known: Mapping[str, Tag], sizes: Mapping[str, int], entries: _Entries, default: str
) -> dict[str, Cell]:
    row: dict[str, Cell] = {}
    for name, tag in sorted(known.items(), key=lambda item: item[1].follows is not None):  # leaders first
        said = entries.find(layer, name)
        size = sizes.get(name, 0)
        if tag.follows is not None:
            row[name] = _following(layer, name, tag.follows, row, said, size)
        elif said is None:
            row[name] = Cell(_default_place(tag, default) if name in sizes else None, "placement.default", size)
        else:
            _check_effect(layer, name, tag, said, sizes)
            row[name] = Cell(said[0], said[1], size)
    return {name: row[name] for name in known}


def _default_place(tag: Tag, default: str) -> str:
    if tag.discrete or (tag.carried and default == "remat"):
        return "device"
    return default


def _following(
    layer: int, name: str, leader: str, row: Mapping[str, Cell], said: tuple[str, str] | None, size: int
) -> Cell:
    if said is not None and said[0] != row[leader].place:
        problem = f"shares the place of {leader}, which is {row[leader].place} in layer {layer}"
        raise ConfigError(said[1], said[0], problem, hint=f"name {leader} instead; {name} moves along")
    return Cell(row[leader].place, f"follows {leader}", size)


def _check_effect(layer: int, name: str, tag: Tag, said: tuple[str, str], sizes: Mapping[str, int]) -> None:
    place, key = said
    if tag.carried and place == "remat":
        problem = "the input of a block cannot be recomputed from within the block"
        raise NoEffect(key, place, problem, allowed=("device", "host"))
    if name not in sizes:
        problem = f"no derivative in layer {layer} reads {name}: no place of it has an effect"
        raise NoEffect(key, place, problem, hint=f"name one of: {', '.join(sizes)}")
