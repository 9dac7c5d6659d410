"""A smaller model with the same rows of the table: what a placement does to numbers, on the device at hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from recipes.config import Config
from recipes.placement.resolve import Cell, Table
from recipes.placement.state import StatePlacement
from zoo.checks import ConfigError


def shrink(config: Config, table: Table, layers: int | None = None, sequence: int | None = None) -> Config:
    """The configuration with that many layers, of every distinct row at least one, and shorter sequences.

    Layers of multi-token prediction all stay and are not counted. Raises ConfigError for more layers than there are,
    for fewer than the table has distinct rows, and if `train.freeze` names layers, which would be others.
    """
    if sequence is not None:
        if not 0 < sequence <= config.train.sequence_length:
            raise ConfigError("sequence", sequence, f"must be between 1 and {config.train.sequence_length}")
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, sequence_length=sequence))
        config.mesh.require_batch(config.train.batch_size, sequence, config.train.accumulate)
    if layers is None or layers == config.model.num_layers:
        return config
    if not 0 < layers <= config.model.num_layers:
        raise ConfigError("layers", layers, f"must be between 1 and {config.model.num_layers}")
    if any(pattern.startswith(("layers", "*")) for pattern in config.train.freeze):
        raise ConfigError("layers", layers, "the model cannot be shrunk while train.freeze names layers")
    kept = _kept(table, layers, config.model.num_layers)
    model: Any = dataclasses.replace(config.model, num_layers=layers)
    if hasattr(model, "num_dense_layers"):
        dense = sum(layer < config.model.num_dense_layers for layer in kept)  # type: ignore[union-attr]
        model = dataclasses.replace(config.model, num_layers=layers, num_dense_layers=dense)
    rows = [table.layers[layer] for layer in (*kept, *range(config.model.num_layers, len(table.layers)))]
    state = _state_of(table, (*kept, *range(config.model.num_layers, len(table.layers))))
    placement = dataclasses.replace(config.placement, activations={}, layers=_said(rows), state=state)
    return dataclasses.replace(config, model=model, placement=placement)


def num_rows(table: Table, config: Config) -> int:
    """How many distinct rows the layers of the model have: no fewer can be checked."""
    return len({_row(table, layer) for layer in range(config.model.num_layers)})


def _kept(table: Table, layers: int, num_layers: int) -> list[int]:
    """The first layer of each distinct row, and further ones from the front."""
    first: dict[Any, int] = {}
    for layer in range(num_layers):
        first.setdefault(_row(table, layer), layer)
    if layers < len(first):
        raise ConfigError("layers", layers, f"the table has {len(first)} distinct rows: that many layers at least")
    others = [layer for layer in range(num_layers) if layer not in first.values()]
    return sorted([*first.values(), *others[: layers - len(first)]])


def _row(table: Table, layer: int) -> tuple:
    places = tuple((tag, cell.place) for tag, cell in table.layers[layer].items())
    return places, table.placement.state.row(layer, len(table.layers))


def _state_of(table: Table, kept: Sequence[int]) -> StatePlacement:
    """The places of the state, what is said of layers by their new numbers."""
    state = table.placement.state
    if not state.layers:
        return state
    layers = {str(number): state.said(layer, len(table.layers)) for number, layer in enumerate(kept)}
    return dataclasses.replace(state, layers=layers)


def _said(rows: Sequence[dict[str, Cell]]) -> dict[str, dict[str, str]]:
    """Every cell by name, but for those that have no effect or follow another."""
    named = [
        {tag: cell.place for tag, cell in row.items() if cell.place and not cell.reason.startswith("follows")}
        for row in rows
    ]
    return {str(layer): cells for layer, cells in enumerate(named) if cells}
