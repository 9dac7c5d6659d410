"""A state's arrays: where they are asked to be, and where the arrays or the compiled program have them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from recipes.placement.hosted import place_of
from recipes.placement.segments import is_run
from recipes.plan.memory import local_shape
from recipes.verify.hlo_text import Array, arrays
from recipes.verify.transfers import Transfer
from zoo.paths import path_name

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_AT_ONCE, _NOT_BY_LAYER = "its layers are moved at once", "no asynchronous copy brings its layers one by one"


@dataclass(frozen=True)
class Argument:
    """What is asked of an argument of a function.

    `shape`: of one device's part; `donated`: a result is to take its place; `layers`: how many a stack holds, 0 for
    what is none.
    """

    name: str
    place: str
    shape: tuple[int, ...]
    donated: bool
    layers: int


@dataclass(frozen=True)
class StateArray:
    """An array of the state: the place that is asked, the one that is found, and what is wrong with it."""

    name: str
    asked: str
    found: str
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None


def arguments_of(lowered: Any, args: Sequence[Any]) -> tuple[Argument, ...]:
    """The arguments of the program that `fn(*args)` was lowered to; those that nothing reads are not among them."""
    donated = [each.donated for each in jax.tree.leaves(lowered.args_info[0])]
    asked = [
        Argument(name, place_of(leaf), local_shape(leaf), given, layers)
        for (name, leaf, layers), given in zip(_leaves(tuple(args)), donated, strict=True)
    ]
    # No public way to ask which arguments were left out.
    return tuple(asked[number] for number in sorted(lowered._lowering.compile_args["kept_var_idx"]))


def check_arguments(
    hlo: str, arguments: Sequence[Argument], moves: Sequence[Transfer]
) -> tuple[tuple[StateArray, ...], set[tuple]]:
    """The donated arguments and those on the host in a compiled program; and the kinds of host arrays that they are.

    Each has to be where it is asked to be; one that is donated and on the host needs a result on the host in its place;
    a stack of layers on the host needs an asynchronous copy of one layer for each array, and none of the whole.
    Raises ValueError if the program has other arguments.
    """
    given, results, aliases = _entry(hlo)
    if [each.dims for each in given] != [each.shape for each in arguments]:
        raise ValueError(f"the program has {len(given)} arguments of other shapes than the {len(arguments)} asked for")
    by_layer, at_once = Counter(_one_layer(moves)), {_kind(each.host_array) for each in moves if _is_whole(each)}
    found = []
    for number, (asked, array) in enumerate(zip(arguments, given, strict=True)):
        if not asked.donated and asked.place == array_place(array) == "device":
            continue
        problem = None
        result = results[aliases[number]] if number in aliases else None
        if array_place(array) != asked.place:
            problem = f"is on {array_place(array)}"
        elif asked.donated and asked.place == "host" and result is None:
            problem = "is not changed in place: there are two of it on the host"
        elif asked.donated and result is not None and result.on_host != array.on_host:
            problem = f"is on {array_place(result)} after the step"
        elif asked.place == "host" and asked.layers > 1:
            problem = _how_moved(asked, array, by_layer, at_once)
        found.append(StateArray(asked.name, asked.place, array_place(array), problem))
    return tuple(found), {_kind(array) for array in given if array.on_host}


def check_kinds(tree: PyTree, places: Iterable[str]) -> tuple[StateArray, ...]:
    """The kinds of memory of arrays at hand against the places asked of them, in order."""
    found = []
    for (path, leaf), place in zip(jax.tree.leaves_with_path(tree), places, strict=True):
        there = place_of(leaf)
        found.append(StateArray(path_name(path), place, there, None if there == place else f"is on {there}"))
    return tuple(found)


def array_place(array: Array) -> str:
    """`host` or `device`."""
    return "host" if array.on_host else "device"


def _how_moved(asked: Argument, array: Array, by_layer: Counter, at_once: set[tuple]) -> str | None:
    if _kind(array) in at_once:
        return _AT_ONCE
    key = (array.dtype, array.num_bytes, asked.layers)
    by_layer[key] -= 1  # each stack needs a copy of its own
    return _NOT_BY_LAYER if by_layer[key] < 0 else None


def _one_layer(moves: Iterable[Transfer]) -> Iterator[tuple]:
    for move in moves:
        if not move.out and move.asynchronous and move.host_bytes % max(move.moved_bytes, 1) == 0:
            yield move.host_array.dtype, move.host_bytes, move.steps


def _is_whole(move: Transfer) -> bool:
    return move.moved_bytes == move.host_bytes and not move.blank


def _kind(array: Array) -> tuple:
    return array.dtype, array.dims


def _entry(hlo: str) -> tuple[tuple[Array, ...], tuple[Array, ...], dict[int, int]]:
    """Arguments and results of the program, and argument -> the result that takes its place."""
    head = hlo.partition("\n")[0]
    _, found, layout = head.partition("entry_computation_layout={")
    if not found:
        raise ValueError("this program does not say where its arguments are")
    given, _, results = layout.partition(")->")
    aliases = head.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    pairs = {int(argument): int(result or 0) for result, argument in _ALIAS.findall(aliases)}
    return arrays(given), arrays(results), pairs


def _leaves(args: PyTree) -> Iterator[tuple[str, Any, int]]:
    """Path, array and number of layers of each."""
    for path, node in jax.tree.leaves_with_path(args, is_leaf=is_run):
        layers = node.length if is_run(node) else 0
        for inner, leaf in jax.tree.leaves_with_path(node):
            yield path_name((*path[1:], *inner)), leaf, layers
