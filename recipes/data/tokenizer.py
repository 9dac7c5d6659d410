"""Text as the tokens of a Hugging Face `tokenizer.json`."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Integer

from zoo.checks import ConfigError


class Tokenizer:
    """The `tokenizers` library's reading of the file. Raises ConfigError if it cannot read it."""

    def __init__(self, file: Path):
        import tokenizers

        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exceptions
            raise ConfigError("tokenizer", file, f"cannot be read: {error}") from error

    @property
    def vocabulary(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The tokens, with those that the tokenizer puts around a text."""
        return np.asarray(self._tokenizer.encode(text).ids, np.int32)

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        return self._tokenizer.decode(tokens.tolist())
