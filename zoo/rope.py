"""Configuration of the rotary embedding. Free of jax."""

from dataclasses import dataclass

from zoo.checks import ConfigError, require_choice, require_positive


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; the fields are those of `layers.Rope`."""

    theta: float = 10000.0
    layout: str = "half"
    scaling: str = "none"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        require_choice("model.rope.layout", self.layout, ("half", "interleaved"))
        require_choice("model.rope.scaling", self.scaling, ("none", "llama3", "yarn"))
        require_positive("model.rope", self, "factor", "low_freq_factor", "beta_fast", "beta_slow")
        if not self.theta > 1:
            raise ConfigError("model.rope.theta", self.theta, "must be above one, so that frequencies fall")
        if not self.low_freq_factor < self.high_freq_factor:
            problem = f"must be above low_freq_factor={self.low_freq_factor}"
            raise ConfigError("model.rope.high_freq_factor", self.high_freq_factor, problem)
        if self.scaling != "none" and self.original_length <= 0:
            raise ConfigError(
                "model.rope.original_length", self.original_length, f"{self.scaling} scaling needs the original length"
            )
