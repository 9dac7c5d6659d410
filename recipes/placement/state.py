"""Where parameters, masters, gradients and moments live: the grammar of `placement.state`. Free of jax."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recipes.placement.layer_keys import layer_numbers, parse
from zoo.checks import ConfigError, require_choice

STATE_PLACES = ("device", "host")
KINDS = ("params", "master", "gradients", "optimizer")
GROUPS = {"embeddings": ("embedding", "head"), "norms": ("*norm",)}
DEFAULT = "default"

Said = str | Mapping[str, Any]  # a place, or a map of parts (and of moments, for `optimizer`) to what is said of them


class Entry(NamedTuple):
    """A place that is said of a kind of state; `names` are the parts and moments on the way to it."""

    kind: str
    key: str
    names: tuple[str, ...]
    place: str


@dataclass(frozen=True, kw_only=True)
class StatePlacement:
    """Where parameters, float32 masters, gradients and the optimizer's moments live between and within steps.

    Each is `device`, `host`, or a map of parts to these, `default` for what it does not name:

        params: device
        master: {experts: host}
        optimizer: {mu: host, nu: device}            # moments by their name in the optimizer's state
        layers: {"0-29": {optimizer: host}}          # of these layers, whatever is said above

    A part is a name on the path of a parameter (`attention`, `mlp`, `experts`, `router`, `shared`, `up_proj`, ...),
    `embeddings` (embedding and head) or `norms`. Of layer keys the one that names fewer layers wins. `update`: whose
    processor computes the optimizer's update. Raises ConfigError for a word that is no place or a key of another form;
    parts and layers are checked when the model is known.
    """

    params: Said = "device"
    master: Said = "device"
    gradients: Said = "device"
    optimizer: Said = "device"
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    update: str = "device"

    def __post_init__(self):
        for kind in KINDS:
            _require(f"placement.state.{kind}", getattr(self, kind))
        layers: dict[str, Mapping[str, Any]] = {}
        for key, cells in self.layers.items():
            where = f"placement.state.layers.{key}"
            parse(str(key), "placement.state.layers")
            if not isinstance(cells, Mapping):
                raise ConfigError(where, cells, "needs a map, as {optimizer: host}")
            for kind, said in cells.items():
                if kind not in KINDS:
                    raise ConfigError(f"{where}.{kind}", said, "no such part of the state", allowed=KINDS, name=kind)
                _require(f"{where}.{kind}", said)
            if str(key) in layers:
                raise ConfigError("placement.state.layers", key, "stands twice, as a number and as a word")
            layers[str(key)] = dict(cells)
        object.__setattr__(self, "layers", layers)
        _require_update(self.update)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def anything_on_host(self) -> bool:
        """Whether something is asked to be on the host."""
        return any(entry.place == "host" for entry in self.entries())

    def entries(self) -> Iterator[Entry]:
        """Everything that is said."""
        for kind in KINDS:
            yield from _entries(kind, f"placement.state.{kind}", (), getattr(self, kind))
        for key, cells in self.layers.items():
            for kind, said in cells.items():
                yield from _entries(kind, f"placement.state.layers.{key}.{kind}", (), said)

    def place(self, kind: str, names: Collection[str], layer: int | None, num_layers: int) -> str:
        """The place of one array of a kind, on whose path these `names` stand, of a layer (None: outside of all).

        Raises ConfigError where two entries disagree.
        """
        key, said = self._deciding(kind, layer, num_layers)
        return _find(said, names, key) or "device"

    def said(self, layer: int, num_layers: int) -> dict[str, Said]:
        """What decides about each kind of a layer's state."""
        return {kind: self._deciding(kind, layer, num_layers)[1] for kind in KINDS}

    def row(self, layer: int, num_layers: int) -> tuple[str, ...]:
        """What is said of a layer's state: layers of equal rows may share arrays."""
        return tuple(map(repr, self.said(layer, num_layers).values())) if self.layers else ()

    def _deciding(self, kind: str, layer: int | None, num_layers: int) -> tuple[str, Said]:
        """`(key, what it says)` of the entry that decides; raises ConfigError if two of equal reach disagree."""
        entry = "placement.state.layers"
        numbers = {key: layer_numbers(key, num_layers, entry) for key, cells in self.layers.items() if kind in cells}
        reach = {key: len(each) for key, each in numbers.items() if layer in each}
        deciding = [key for key in reach if reach[key] == min(reach.values())]
        for key in deciding[1:]:
            if self.layers[key][kind] != self.layers[deciding[0]][kind]:
                problem = f"layer {layer} is also named by {deciding[0]}, which says {self.layers[deciding[0]][kind]}"
                raise ConfigError(f"{entry}.{key}.{kind}", self.layers[key][kind], problem)
        if deciding:
            return f"{entry}.{deciding[0]}.{kind}", self.layers[deciding[0]][kind]
        return f"placement.state.{kind}", getattr(self, kind)


def is_part(part: str, names: Collection[str]) -> bool:
    """Whether a parameter on whose path these names stand belongs to the part."""
    wanted = GROUPS.get(part, (part,))
    return any(name == word or (word[0] == "*" and name.endswith(word[1:])) for name in names for word in wanted)


def _find(said: Said, names: Collection[str], key: str) -> str | None:
    """The place that is said of an array, None if nothing is."""
    if isinstance(said, str):
        return said
    found = {
        name: place
        for name, each in said.items()
        if name != DEFAULT and is_part(name, names) and (place := _find(each, names, f"{key}.{name}")) is not None
    }
    if len(set(found.values())) > 1:
        first, second = list(found)[:2]
        problem = f"disagrees with {key}.{second}={found[second]} about {'.'.join(names)}"
        raise ConfigError(f"{key}.{first}", found[first], problem, hint=f"write {first}: {{{second}: ...}} instead")
    return next(iter(found.values()), said.get(DEFAULT))


def _entries(kind: str, key: str, names: tuple[str, ...], said: Said) -> Iterator[Entry]:
    if isinstance(said, str):
        yield Entry(kind, key, names, said)
        return
    for name, each in said.items():
        yield from _entries(kind, f"{key}.{name}", names if name == DEFAULT else (*names, name), each)


def _require(key: str, said: Any) -> None:
    if not isinstance(said, Mapping):
        require_choice(key, said, STATE_PLACES)
        return
    for name, each in said.items():
        if not isinstance(name, str):
            raise ConfigError(f"{key}.{name}", each, "names no part: parts are words")
        _require(f"{key}.{name}", each)


def _require_update(update: str) -> None:
    """Refuses the host's processor: `python -m tests.bench.update_on_host` shows what XLA makes of it."""
    key = "placement.state.update"
    require_choice(key, update, STATE_PLACES)
    if update == "host":
        problem = (
            "cannot help today: compiled for CUDA, compute_on has each layer's state copied to the device before the "
            "host's processor gets it, and back after: it would cross the link as it does now"
        )
        raise ConfigError(key, update, problem, hint="python -m tests.bench.update_on_host shows it")
