"""What a training run is told besides model, placement, optimizer and data. Free of jax."""

from dataclasses import dataclass

from zoo.checks import ConfigError, require_at_most, require_choice, require_not_negative, require_positive

INT32_MAX, UINT32_MAX = 2**31 - 1, 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run of `zoo-train`.

    - `batch_size`: sequences a step, over all `accumulate` micro-batches; `sequence_length`: tokens of each.
    - `dtype`: of computation; with `bfloat16` masters, gradients' sums and moments are float32.
    - `balance_loss`, `z_loss`, `mtp_loss`: coefficients of `recipes.next_token_loss`; `router_bias_rate`: see
      `recipes.make_train_step`.
    - `validation_batches`: batches of the held-out text that the loss at the end is taken over; 0 for none.
    - `sample_tokens`: length of the greedy sample at the end; 0 for none.
    """

    steps: int = 300
    batch_size: int = 8
    sequence_length: int = 256
    accumulate: int = 1
    dtype: str = "float32"
    seed: int = 0
    balance_loss: float = 1e-4
    z_loss: float = 0.0
    mtp_loss: float = 0.3
    router_bias_rate: float = 1e-3
    validation_batches: int = 32
    sample_tokens: int = 160

    def __post_init__(self):
        require_positive("train", self, "steps", "batch_size", "sequence_length", "accumulate")
        require_choice("train.dtype", self.dtype, ("float32", "bfloat16"))
        require_not_negative("train", self, "balance_loss", "z_loss", "mtp_loss", "router_bias_rate", "seed")
        require_not_negative("train", self, "validation_batches", "sample_tokens")
        require_at_most(INT32_MAX, "train", self, "steps", "batch_size", "sequence_length")
        if self.seed > UINT32_MAX:
            problem = f"must be at most {UINT32_MAX}: a key is made of the seed's lower 32 bits"
            raise ConfigError("train.seed", self.seed, problem)
        if self.batch_size % self.accumulate:
            problem = f"does not divide train.batch_size={self.batch_size}"
            raise ConfigError("train.accumulate", self.accumulate, problem)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes. `compile_cache`: folder of JAX's persistent compilation cache, null for none."""

    dir: str
    compile_cache: str | None = None

    def __post_init__(self):
        if not self.dir:
            raise ConfigError("run.dir", "", "must name a folder")
