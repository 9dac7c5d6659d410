"""What a run is told. Free of jax and of Hydra."""

from dataclasses import dataclass

from recipes.data.config import DataConfig
from recipes.optim import OptimizerConfig
from recipes.placement.spec import Placement
from recipes.sharding.config import MeshConfig
from recipes.verify.versions import ACCEPTABLE
from recipes.watch.profile import steps_to_profile
from zoo.checks import ConfigError, require_at_most, require_choice, require_not_negative, require_positive
from zoo.folders import at
from zoo.registry import ModelConfig

INT32_MAX, UINT32_MAX = 2**31 - 1, 2**32 - 1


def require_folder(key: str, folder: str, *, local: bool = False, hint: str = "") -> None:
    """Raises ConfigError unless this is a path or, if it need not be `local`, the address of a folder in a store."""
    if not folder:
        raise ConfigError(key, folder, "must name a folder")
    if local and "://" in folder:
        raise ConfigError(key, folder, "must be a folder of a mounted file system, not an address", hint=hint)
    at(folder, key)


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """One of several processes; what is None is found out by JAX from the launcher.

    - `coordinator`: `HOST:PORT` of process 0; `processes`: how many there are; `index`: which one this is, from 0.
    """

    coordinator: str | None = None
    processes: int | None = None
    index: int | None = None

    def __post_init__(self):
        if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdecimal():
            raise ConfigError("train.distributed.coordinator", self.coordinator, "must be of the form HOST:PORT")
        if self.processes is not None and self.processes < 1:
            raise ConfigError("train.distributed.processes", self.processes, "must be above zero")
        if self.index is not None and not 0 <= self.index < (self.processes or INT32_MAX):
            problem = f"must be from 0 to {self.processes - 1}" if self.processes else "must not be negative"
            raise ConfigError("train.distributed.index", self.index, problem)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run of `zoo-train`.

    - `batch_size`: sequences a step, over all `accumulate` micro-batches; `sequence_length`: tokens of each.
    - `dtype`: of computation; with `bfloat16` masters, gradients' sums and moments are float32.
    - `balance_loss`, `z_loss`, `mtp_loss`: coefficients of `recipes.next_token_loss`; `router_bias_rate`: see
      `recipes.make_train_step`.
    - `wide_gradients`: see `recipes.make_train_step`; with `float32` they are that already.
    - `init_from`: a checkpoint or a Hugging Face folder whose weights training starts from; null: drawn from `seed`.
    - `checkpoint_dir`: where checkpoints are: a local folder or, in an object store, `gs://BUCKET/PATH` or
      `s3://BUCKET/PATH`; null: `checkpoints` in `run.dir`.
    - `resume`: what a run does where there are checkpoints already: `auto` goes on from the last if there is one,
      `must` ends if there is none, `never` sets them aside (in a store: is refused) and begins anew. `allow_cast`: a
      checkpoint's arrays may be of other dtypes than the run's.
    - `checkpoint_every`: steps from one checkpoint to the next; there is one at the end, on Ctrl-C and on SIGTERM too;
      0 for none at all. Kept are the last `keep_last`, and all whose step is a multiple of `keep_every` (0: no others).
    - `freeze`: patterns of parameters that stay as they are, see `recipes.frozen`.
    - `distributed`: the other processes of the run: `auto` asks JAX's launcher variables, SLURM, Open MPI and TPU pods;
      a map says it; null is one process.
    - `max_bad_steps`: after so many in a row whose loss or gradient norm is not finite the run stops; each leaves the
      update out. `spike_factor`: a gradient norm of so many times the running median is reported.
    - `validation_batches`: batches of the held-out text that the loss is taken over, every `validate_every` steps and
      at the end; 0 batches for none, every 0 steps for the end alone.
    - `tensorboard`: whether events are written beside `metrics.jsonl`.
    - `profile`: steps to trace for XProf into `profile/`, `10-12` or `10`; null for none.
    - `stall_factor`: a step that takes so many times the median, and five seconds, is reported; null: none is.
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
    wide_gradients: bool = False
    init_from: str | None = None
    checkpoint_dir: str | None = None
    resume: str = "auto"
    allow_cast: bool = False
    checkpoint_every: int = 100
    keep_last: int = 2
    keep_every: int = 0
    freeze: tuple[str, ...] = ()
    distributed: Distributed | str | None = "auto"
    max_bad_steps: int = 10
    spike_factor: float = 10.0
    validate_every: int = 0
    validation_batches: int = 32
    sample_tokens: int = 160
    tensorboard: bool = True
    profile: str | None = None
    stall_factor: float | None = 10.0

    def __post_init__(self):
        require_positive("train", self, "steps", "batch_size", "sequence_length", "accumulate")
        require_choice("train.dtype", self.dtype, ("float32", "bfloat16"))
        require_not_negative("train", self, "balance_loss", "z_loss", "mtp_loss", "router_bias_rate", "seed")
        require_not_negative("train", self, "validate_every", "validation_batches", "sample_tokens")
        require_positive("train", self, "max_bad_steps", "spike_factor", "keep_last")
        require_not_negative("train", self, "checkpoint_every", "keep_every")
        require_choice("train.resume", self.resume, ("auto", "must", "never"))
        for name in ("init_from", "checkpoint_dir"):
            if getattr(self, name) is not None:
                require_folder(f"train.{name}", getattr(self, name))
        if self.stall_factor is not None and self.stall_factor <= 1:
            raise ConfigError("train.stall_factor", self.stall_factor, "must be above one, or null")
        require_at_most(INT32_MAX, "train", self, "steps", "batch_size", "sequence_length")
        steps_to_profile(self.profile, self.steps)
        if self.seed > UINT32_MAX:
            problem = f"must be at most {UINT32_MAX}: a key is made of the seed's lower 32 bits"
            raise ConfigError("train.seed", self.seed, problem)
        for pattern in self.freeze:
            if not isinstance(pattern, str) or not pattern:
                raise ConfigError("train.freeze", pattern, "must be a list of patterns of parameters' paths")
        if isinstance(self.distributed, str):
            require_choice("train.distributed", self.distributed, ("auto",))
        if self.batch_size % self.accumulate:
            problem = f"does not divide train.batch_size={self.batch_size}"
            raise ConfigError("train.accumulate", self.accumulate, problem)


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """What `zoo-import` reads, a Hugging Face folder, and writes, a checkpoint, local or in an object store."""

    hf: str
    out: str

    def __post_init__(self):
        require_folder("hf", self.hf, local=True)
        require_folder("out", self.out)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What `zoo-export` reads, a checkpoint, local or in an object store, and writes, a local Hugging Face folder."""

    checkpoint: str
    out: str

    def __post_init__(self):
        require_folder("checkpoint", self.checkpoint)
        require_folder("out", self.out, local=True)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What `zoo-eval` does.

    - `checkpoint`: a checkpoint of this project, local or in an object store, or a Hugging Face folder.
    - `split`: `all` of the text, or the part that `zoo-train` with the same `data` trains or validates on.
    - `sequence_length`: tokens that are seen together; `batch_size`: sequences at a time.
    - `batches`: at most so many; 0 for the whole text.
    - `prompt`: text that the model goes on from, with `sample_tokens` tokens at `temperature` (0: the likeliest).
    """

    checkpoint: str
    split: str = "all"
    sequence_length: int = 512
    batch_size: int = 4
    batches: int = 0
    dtype: str = "float32"
    prompt: str | None = None
    sample_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        require_folder("checkpoint", self.checkpoint)
        require_choice("split", self.split, ("all", "train", "validation"))
        require_choice("dtype", self.dtype, ("float32", "bfloat16"))
        for name in ("sequence_length", "batch_size", "sample_tokens"):
            if not 0 < getattr(self, name) <= INT32_MAX:
                raise ConfigError(name, getattr(self, name), f"must be between 1 and {INT32_MAX}")
        for name in ("batches", "temperature", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must not be negative")


@dataclass(frozen=True, kw_only=True)
class EvalRunConfig:
    """`json`: a file for the figures; `compile_cache`: folder of JAX's persistent compilation cache; null for none."""

    json: str | None = None
    compile_cache: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes, on this machine. `compile_cache`: folder of JAX's persistent compilation cache, or null."""

    dir: str
    compile_cache: str | None = None

    def __post_init__(self):
        require_folder("run.dir", self.dir, local=True, hint="train.checkpoint_dir takes one, for the checkpoints")


@dataclass(frozen=True)
class Config:
    """A configuration read and checked, as far as it can be without the model.

    - `explain`: say who decided each cell.
    - `verify`: before the first step: `true` proves placement and gradients, `trace` (the default) looks for every
      placement in the traced step, `false` does neither.
    - `accept`: the name of a known risk of the compiler to take (`recipes.verify.versions`).
    """

    model: ModelConfig
    placement: Placement
    explain: bool
    mesh: MeshConfig
    optimizer: OptimizerConfig
    data: DataConfig
    train: TrainConfig
    run: RunConfig
    verify: str = "trace"
    accept: str | None = None

    def __post_init__(self):
        require_choice("verify", self.verify, ("true", "trace", "false"))
        if self.accept is not None:
            require_choice("accept", self.accept, ACCEPTABLE)
