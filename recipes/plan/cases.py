"""What `zoo-plan` plans: the configuration as it stands, several placements, or the rows of a published table.

Free of jax.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from recipes.config import Config
from recipes.placement.spec import Placement
from recipes.plan.targets import Target
from zoo.checks import ConfigError

TABLES = "recipes.plan.published"
_FIGURES = ("fits", "device_gib", "host_gib", "against")


@dataclass(frozen=True)
class Published:
    """A row of a published table, as far as it is known: whether it ran, GiB of a device and of its share of the host.

    `against`: the row that this one is to be compared with, part by part.
    """

    fits: bool | None = None
    device_gib: float | None = None
    host_gib: float | None = None
    against: str | None = None


@dataclass(frozen=True)
class Case:
    """One step to plan, under a name; `options` are compiler options on top of its own."""

    name: str
    config: Config
    target: Target
    options: Mapping[str, Any]
    published: Published | None = None

    def with_train(self, **fields: Any) -> "Case":
        """The same with other `train` fields."""
        train = dataclasses.replace(self.config.train, **fields)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, train=train))

    def with_model(self, **fields: Any) -> "Case":
        """The same with other `model` fields."""
        model = dataclasses.replace(self.config.model, **fields)  # type: ignore[type-var]
        return dataclasses.replace(self, config=dataclasses.replace(self.config, model=model))

    def with_fsdp(self, size: int) -> "Case":
        """The same on a mesh with another `fsdp` axis, and as many devices as that needs."""
        mesh = dataclasses.replace(self.config.mesh, fsdp=size)
        config = dataclasses.replace(self.config, mesh=mesh)
        return dataclasses.replace(self, config=config, target=self.target.of(mesh.num_devices))


def compared(case: Case, placements: tuple[str, ...]) -> list[Case]:
    """The case under each of the placements, by the names of their presets."""
    configs = {name: dataclasses.replace(case.config, placement=Placement.preset(name)) for name in placements}
    return [dataclasses.replace(case, name=name, config=config) for name, config in configs.items()]


def published_cases(case: Case, table: str) -> tuple[str, list[Case]]:
    """`(source, cases)` of a published table: the case with each row's placement, batch and compiler options."""
    content = _read(table)
    cases = []
    for row in content["rows"]:
        changed = dataclasses.replace(case.config, placement=Placement.preset(row["placement"]))
        found = dataclasses.replace(
            case,
            name=row["name"],
            config=changed,
            options={**case.options, **row.get("options", {})},
            published=Published(**{key: row[key] for key in _FIGURES if key in row}),
        )
        cases.append(found.with_train(batch_size=row["batch_size"]) if "batch_size" in row else found)
    return content["source"], cases


def tables() -> list[str]:
    """Names of the published tables."""
    files = resources.files(TABLES).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def _read(table: str) -> dict[str, Any]:
    import yaml  # comes with Hydra

    if table not in tables():
        raise ConfigError("plan.published", table, "no such table", allowed=tables())
    return yaml.safe_load(resources.files(TABLES).joinpath(f"{table}.yaml").read_text())
