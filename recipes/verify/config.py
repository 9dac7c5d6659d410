"""What `zoo-verify` is told beside the run that it verifies. Free of jax."""

from dataclasses import dataclass

from zoo.checks import ConfigError


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """How much is checked.

    - `gradients`: whether the step runs on the device at hand, for `steps` steps.
    - `layers`, `sequence`: of the model that runs, null for those of the whole one; every distinct row of the table
      stays.
    - `timeout_s`: how long the compiler may take for the target.
    """

    gradients: bool = True
    steps: int = 2
    layers: int | None = None
    sequence: int | None = None
    timeout_s: float = 1800.0

    def __post_init__(self):
        for name in ("steps", "layers", "sequence", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, value, "must be above zero")


@dataclass(frozen=True, kw_only=True)
class VerifyRunConfig:
    """`json`: a file for the report; `dir`: not used, so that a run's overrides can be given as they are."""

    json: str | None = None
    dir: str | None = None
    compile_cache: str | None = None
