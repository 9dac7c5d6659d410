"""What to train on. Free of jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field as default
from typing import Any

from zoo.checks import ConfigError, from_fields, require_choice, require_not_negative

SOURCES = ("stdlib", "text", "jsonl", "mix", "synthetic")
FILES = ("text", "jsonl")
BYTES = "bytes"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source of a mixture: its share of the sequences is its weight over the sum of all weights.

    `source` is `stdlib`, `text` or `jsonl`, by default what the ending of `path` says; fields that are None are those
    of the mixture.
    """

    weight: float = 1.0
    path: str | None = None
    source: str | None = None
    field: str | None = None
    prompt_field: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how they are cut.

    - `source`: `stdlib` (the running Python's standard library), `text`, `jsonl`, `mix` or `synthetic` (uniform random
      tokens).
    - `path`: what `text` and `jsonl` read: a file, a folder or a glob, files ending in `.gz` unpacked.
    - `field`: of a JSONL record, its text. `prompt_field`: of a supervised record, the text before it, which is read
      but not learnt: such records are kept whole, `loss_mask` is zero on the prompt and on the filling after them.
    - `mix`: for `source=mix`, a map from names to `Part`s.
    - `tokenizer`: a Hugging Face `tokenizer.json`, or `bytes`; null: that beside `train.init_from`, else bytes.
    - `separator`: the token of the tokenizer that ends a document; null: its only end-of-text token.
    - `validation_path`: what to validate on, of the same source; null: a share of the documents.
    - `validation_fraction`: that share; of a single document, of its tokens.
    - `document_mask`: batches say where documents begin, so that attention and positions stay within one.
    - `readers`: processes that tokenise, and then read batches, beside the training one. What a batch holds does not
      depend on it.
    - `max_malformed`: records of a source that may be skipped because they cannot be read. None by default: a
      misspelt field or a broken export makes itself known at once, and who knows of bad lines says how many.
    - `cache`: folder of the tokens of all that is not small text.
    - `seed`: the order of documents and sequences, which documents are held out, and synthetic tokens.

    Raises ConfigError if a field is out of range or would be ignored, or if `path` is missing.
    """

    source: str = "stdlib"
    path: str | None = None
    field: str = "text"
    prompt_field: str | None = None
    mix: Mapping[str, Any] = default(default_factory=dict)
    tokenizer: str | None = None
    separator: str | None = None
    validation_path: str | None = None
    validation_fraction: float = 0.05
    document_mask: bool = False
    readers: int = 0
    max_malformed: int = 0
    cache: str = "~/.cache/offload-zoo/data"
    seed: int = 0

    def __post_init__(self):
        require_choice("data.source", self.source, SOURCES)
        if self.source in FILES and not self.path:
            raise ConfigError("data.path", self.path, f"data.source={self.source} needs a file or a folder to read")
        if self.source not in FILES and self.path is not None:
            problem = f"data.source={self.source} reads no path"
            hint = "set data.source=text or jsonl, or leave data.path out"
            raise ConfigError("data.path", self.path, problem, hint=hint)
        self._require_read("mix", self.mix, "mix")
        self._require_read("validation_path", self.validation_path, "mix", *FILES)
        self._require_read("prompt_field", self.prompt_field, "mix", "jsonl")
        self._require_read("field", self.field != "text" and self.field, "mix", "jsonl")
        if self.separator is not None and self.tokenizer == BYTES:
            raise ConfigError("data.separator", self.separator, "belongs to a tokenizer; bytes are separated by NUL")
        if not 0 < self.validation_fraction < 1:
            raise ConfigError("data.validation_fraction", self.validation_fraction, "must be above 0 and below 1")
        require_not_negative("data", self, "seed", "readers", "max_malformed")
        object.__setattr__(self, "mix", {name: _part(name, given) for name, given in self.mix.items()})

    def _require_read(self, name: str, value: Any, *sources: str) -> None:
        if value and self.source not in sources:
            problem = f"data.source={self.source} does not read it"
            raise ConfigError(f"data.{name}", value, problem, hint=f"data.source={' or '.join(sources)} does")

    @property
    def supervised(self) -> bool:
        """Whether batches say what is learnt: some source has prompts."""
        return any(prompt is not None for prompt in (self.prompt_field, *(p.prompt_field for p in self.mix.values())))

    @property
    def arrays(self) -> tuple[str, ...]:
        """What a batch is made of."""
        masked = ("segment_ids", "positions") if self.document_mask else ()
        return ("tokens", *masked, *(("loss_mask",) if self.supervised else ()))

    @property
    def needs(self) -> tuple[str, ...]:
        """The packages of the extra [train] that the data need."""
        tokenizers = ("tokenizers",) if self.tokenizer not in (None, BYTES) else ()
        return (*tokenizers, *(("grain",) if self.readers or self.source == "mix" else ()))


def _part(name: str, given: Any) -> Part:
    key = f"data.mix.{name}"
    if isinstance(given, Part):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(key, given, "needs a map such as {path:FILE,weight:1}")
    part: Part = from_fields(Part, given, key)
    if not part.weight > 0:
        raise ConfigError(f"{key}.weight", part.weight, "must be above zero")
    if part.source is not None:
        require_choice(f"{key}.source", part.source, ("stdlib", *FILES))
    if (part.path is None) != (part.source == "stdlib"):
        raise ConfigError(f"{key}.path", part.path, "must name a file or a folder, or source be stdlib")
    return part
