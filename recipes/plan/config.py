"""What `zoo-plan` is told besides a run's configuration and a target. Free of jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.checks import ConfigError, require_choice, require_positive

MAXIMISE, MINIMISE = ("batch", "sequence", "layers"), ("devices",)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How to plan.

    - `maximise`, `minimise`: search for the largest batch, sequence or number of layers, or the fewest devices along
      `mesh.fsdp`, that fit.
    - `published`: a table of published results (`recipes/plan/published/NAME.yaml`) whose rows are planned too.
    - `options`: compiler options on top of the train step's own.
    - `timeout_s`, `memory_gib`: limits of each compile, which has a process of its own.
    """

    maximise: str | None = None
    minimise: str | None = None
    published: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    memory_gib: float = 32.0

    def __post_init__(self):
        require_positive("plan", self, "timeout_s", "memory_gib")
        for name, allowed in (("maximise", MAXIMISE), ("minimise", MINIMISE)):
            if getattr(self, name) is not None:
                require_choice(f"plan.{name}", getattr(self, name), allowed)
        if self.maximise is not None and self.minimise is not None:
            raise ConfigError("plan.minimise", self.minimise, f"one at a time: plan.maximise={self.maximise} is given")


@dataclass(frozen=True, kw_only=True)
class PlanRunConfig:
    """Where `zoo-plan` writes: `json`, `html`, `png` files; `plans`: folder where plans are kept; null for none.

    `dir` and `compile_cache` mean nothing here: a command line of `zoo-train` can be priced as it stands.
    """

    json: str | None = None
    html: str | None = None
    png: str | None = None
    plans: str | None = None
    dir: str | None = None
    compile_cache: str | None = None
