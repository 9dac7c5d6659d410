"""How the leaves of a model are made of the tensors of a checkpoint, and the other way round.

A table of rules describes both directions: rename, transpose, stack (experts stored one by one), split (gate and up
projections stored as one tensor) and copies (one leaf stored under several names).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from zoo.checks import ConfigError
from zoo.tensors import Spec

SHOWN = 8  # names of a long list that an error prints


class Rule(NamedTuple):
    """One leaf: `path` is `layers.blocks.3.mlp.up_proj.weight`, `names` are tensors.

    - `transposed`: the tensor's last two dims are swapped (`[out, in]` there, `[in, out]` here).
    - `stacked`: the leaf has a leading dim with one tensor for each index; else there is one name.
    - `part`: `(i, n)`: the leaf is the `i`-th of `n` equal parts of the tensor's rows.
    - `copies`: names under which the tensor may stand again, with equal values.
    """

    path: str
    names: tuple[str, ...]
    transposed: bool = False
    stacked: bool = False
    part: tuple[int, int] | None = None
    copies: tuple[str, ...] = ()

    def tensor_shape(self, leaf: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor, given that of the leaf."""
        shape = list(leaf[1:] if self.stacked else leaf)
        if self.transposed:
            shape[-2], shape[-1] = shape[-1], shape[-2]
        if self.part is not None:
            shape[-2] *= self.part[1]
        return tuple(shape)


def leaf_specs(
    rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Spec]
) -> dict[str, Spec]:
    """Shape and dtype of every leaf; `shapes` are those that the model has.

    Raises ConfigError unless every tensor serves a leaf, every leaf has its tensors, and all shapes and dtypes fit.
    """
    wanted = {name for rule in rules for name in rule.names}
    allowed = wanted | {copy for rule in rules for copy in rule.copies}
    missing, unused = [n for n in wanted if n not in tensors], [n for n in tensors if n not in allowed]
    if missing or unused:
        lines = [f"needed and not there: {_some(missing)}"] if missing else []
        lines += [f"there and not used: {_some(unused)}"] if unused else []
        raise ConfigError("tensors", f"{len(tensors)} found", "do not fit the model", hint="\n".join(lines))
    specs = {}
    for rule in rules:
        shape = rule.tensor_shape(shapes[rule.path])
        for name in (*rule.names, *(copy for copy in rule.copies if copy in tensors)):
            if tensors[name].shape != shape:
                problem = f"has shape {list(tensors[name].shape)}, the model needs {list(shape)}"
                raise ConfigError("tensor", name, problem)
            if tensors[name].dtype != tensors[rule.names[0]].dtype:
                problem = f"has dtype {tensors[name].dtype}, {rule.names[0]} has {tensors[rule.names[0]].dtype}"
                raise ConfigError("tensor", name, f"{problem}; they become one array")
        specs[rule.path] = Spec(shapes[rule.path], tensors[rule.names[0]].dtype)
    return specs


def read_leaf(rule: Rule, spec: Spec, tensors: Callable[[str], np.ndarray]) -> np.ndarray:
    """The leaf, read tensor by tensor."""
    if rule.stacked:
        leaf = np.empty(spec.shape, spec.dtype)
        for i, row in enumerate(read_rows(rule, tensors)):
            leaf[i] = row
        return leaf
    return np.ascontiguousarray(_to_leaf(rule, tensors(rule.names[0])))


def read_rows(rule: Rule, tensors: Callable[[str], np.ndarray]) -> Iterator[np.ndarray]:
    """The parts of a stacked leaf, each read when it is asked for."""
    return (_to_leaf(rule, tensors(name)) for name in rule.names)


def check_copies(rule: Rule, present: Iterable[str], tensors: Callable[[str], np.ndarray]) -> None:
    """Raises ConfigError unless the copies that are there equal the original to the bit."""
    for copy in rule.copies:
        if copy in present and not _equal(tensors(copy), tensors(rule.names[0])):
            problem = f"differs from {rule.names[0]}, but the model has one array for both"
            raise ConfigError("tensor", copy, problem)


def tensor_specs(rules: Sequence[Rule], leaves: Mapping[str, Spec], copies: Iterable[str]) -> dict[str, Spec]:
    """Names, shapes and dtypes of the tensors that the leaves become, in the order of `to_tensors`."""
    kept = set(copies)
    specs = {}
    for names, group in _sharing(rules):
        spec = leaves[group[0].path]
        again = [copy for rule in group for copy in rule.copies if copy in kept]
        specs |= {name: Spec(group[0].tensor_shape(spec.shape), spec.dtype) for name in (*names, *again)}
    return specs


def to_tensors(
    rules: Sequence[Rule],
    read: Callable[[str], np.ndarray],
    rows: Callable[[str], Iterator[np.ndarray]],
    copies: Iterable[str],
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors, one after another; `read` gives a leaf, `rows` its parts along the first dim."""
    kept = set(copies)
    for names, group in _sharing(rules):
        parts = (rows(rule.path) if rule.stacked else iter([read(rule.path)]) for rule in group)
        for name, arrays in zip(names, zip(*parts, strict=True), strict=True):
            tensors = [_to_tensor(rule, array) for rule, array in zip(group, arrays, strict=True)]
            tensor = tensors[0] if len(tensors) == 1 else np.concatenate(tensors, axis=-2)
            yield name, tensor
            yield from ((copy, tensor) for rule in group for copy in rule.copies if copy in kept)


def _sharing(rules: Sequence[Rule]) -> Iterator[tuple[tuple[str, ...], list[Rule]]]:
    """Rules that share their tensors; these follow one another."""
    for names, group in groupby(rules, key=lambda rule: rule.names):
        yield names, list(group)


def _to_leaf(rule: Rule, tensor: np.ndarray) -> np.ndarray:
    if rule.part is not None:
        index, count = rule.part
        rows = tensor.shape[-2] // count
        tensor = tensor[..., index * rows : (index + 1) * rows, :]
    return tensor.swapaxes(-1, -2) if rule.transposed else tensor


def _to_tensor(rule: Rule, leaf: np.ndarray) -> np.ndarray:
    return leaf.swapaxes(-1, -2) if rule.transposed else leaf


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """To the bit, row by row: comparing whole arrays would make a third one."""
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def _some(names: Sequence[str]) -> str:
    shown = sorted(names)[:SHOWN]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
