"""What to train on. Free of jax."""

from dataclasses import dataclass

from zoo.checks import ConfigError, require_choice

SOURCES = ("stdlib", "text", "synthetic")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how they are cut.

    - `source`: `stdlib` (the running Python's standard library), `text` (`path`, a file or a folder) or `synthetic`
      (uniform random tokens).
    - `path`: what `text` reads.
    - `validation_fraction`: share of the files that is held out; of a single file, share of its bytes.
    - `document_mask`: batches say where documents begin, so that attention stays within one.
    - `seed`: the order of documents and sequences, which files are held out, and synthetic tokens.

    Raises ConfigError if a field is out of range, or if `path` is missing for `text` or given for another source.
    """

    source: str = "stdlib"
    path: str | None = None
    validation_fraction: float = 0.05
    document_mask: bool = False
    seed: int = 0

    def __post_init__(self):
        require_choice("data.source", self.source, SOURCES)
        if self.source == "text" and not self.path:
            raise ConfigError("data.path", self.path, "data.source=text needs a file or a folder to read")
        if self.source != "text" and self.path is not None:
            problem = f"data.source={self.source} reads no path"
            raise ConfigError("data.path", self.path, problem, hint="set data.source=text, or leave data.path out")
        if not 0 < self.validation_fraction < 1:
            raise ConfigError("data.validation_fraction", self.validation_fraction, "must be above 0 and below 1")
        if self.seed < 0:
            raise ConfigError("data.seed", self.seed, "must not be negative")
