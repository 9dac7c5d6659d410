"""The grammar of a placement: what a recipe may say. Free of jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.placement.layer_keys import parse
from recipes.placement.state import StatePlacement
from zoo import presets
from zoo.checks import ConfigError, from_fields, require_choice, require_positive

PLACES = ("device", "host", "remat")


def require_place(key: str, place: Any) -> None:
    """Raises ConfigError unless `place` is one of `device`, `host`, `remat`."""
    if place in ("offload", "offloaded"):
        raise ConfigError(key, place, "no such place; offloaded arrays are on the place host", allowed=PLACES)
    require_choice(key, place, PLACES)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Layer x tag -> place, and the places of the state.

    - `default`: the place of every tag that nothing else names. Cells where no place has an effect are skipped.
    - `activations`: tag -> place, in every layer that has the tag.
    - `layers`: layers -> tag -> place, where layers is `7`, `0-2`, `6+13+19` or `last`.
    - `state`: see `StatePlacement`; a map of its fields serves too.
    - `group`: a pattern of up to so many rows that repeats, in layers of one kind, becomes one scan, whose step takes
      that many layers. It compiles as fast as one run and keeps the working memory of that many layers at a time.

    `layers` win over `activations` over `default`; among layer keys the one that names fewer layers wins. Raises
    ConfigError for a word that is not a place or a key that is not of this form; names of tags and layers are checked
    by `recipes.resolve`, which knows the model.
    """

    default: str = "remat"
    activations: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    state: StatePlacement = field(default_factory=StatePlacement)
    group: int = 1

    def __post_init__(self):
        if isinstance(self.state, Mapping):
            object.__setattr__(self, "state", from_fields(StatePlacement, self.state, "placement.state"))
        require_positive("placement", self, "group")
        require_place("placement.default", self.default)
        for tag, place in self.activations.items():
            require_place(f"placement.activations.{tag}", place)
        normal: dict[str, Mapping[str, str]] = {}
        for key, cells in self.layers.items():
            if not isinstance(cells, Mapping):
                raise ConfigError(
                    f"placement.layers.{key}", cells, "needs a map of tags to places, as {mlp_gate: host}"
                )
            if str(key) in normal:
                raise ConfigError("placement.layers", key, "stands twice, as a number and as a word")
            for tag, place in cells.items():
                if not isinstance(tag, str):
                    raise ConfigError(f"placement.layers.{key}.{tag}", place, "names no tag: tags are words")
                require_place(f"placement.layers.{key}.{tag}", place)
            parse(str(key), "placement.layers")
            normal[str(key)] = dict(cells)
        object.__setattr__(self, "layers", normal)

    @classmethod
    def preset(cls, name: str) -> "Placement":
        """The placement of `conf/placement/NAME.yaml`. Raises ConfigError for an unknown name."""
        return cls(**presets.read("placement", name, "preset")[1])

    @staticmethod
    def presets() -> list[str]:
        """Names of the presets."""
        return presets.names("placement")
