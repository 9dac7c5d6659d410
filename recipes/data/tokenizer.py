"""Text as tokens: bytes, or what a Hugging Face `tokenizer.json` makes of it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Integer

from recipes.data import bytes as text_bytes
from recipes.data.config import BYTES
from zoo.checks import ConfigError

TOKENIZER = "tokenizer.json"
# What the published tokenizers of Llama, DeepSeek, Gemma, GPT-2, Mistral, OLMo, Phi and Qwen call the end of a text.
END_OF_TEXT = ("<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "<|endoftext|>", "</s>", "[EOS]")  # noqa: RUF001


class Codec(Protocol):
    """From text to tokens and back.

    - `vocabulary`: one above the largest token; `separator`: the token that ends a document, None if there is none.
    - `prefix`: tokens that every document begins with; `file`: the `tokenizer.json`, None for bytes.
    - `fingerprint`: equal for two that make the same tokens; `spec`: what `open_codec` makes its equal from.
    """

    @property
    def vocabulary(self) -> int: ...
    @property
    def separator(self) -> int | None: ...
    @property
    def prefix(self) -> Sequence[int]: ...
    @property
    def file(self) -> Path | None: ...
    @property
    def special_tokens(self) -> Sequence[str]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def spec(self) -> tuple[str | None, str | None]: ...
    def encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " tokens"]]:
        """The tokens of each text by itself, without the prefix."""
        ...

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str: ...


class Bytes:
    """One token a byte of UTF-8, NUL between documents."""

    vocabulary, separator = text_bytes.VOCABULARY, text_bytes.SEPARATOR
    prefix, special_tokens = (), ()
    file, fingerprint, spec = None, BYTES, (None, None)

    def encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " tokens"]]:
        return [text_bytes.encode(text) for text in texts]

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        return text_bytes.decode(tokens)


class Tokenizer:
    """The `tokenizers` library's reading of a file, whose limits of length and padding are left out.

    `separator` names its token that ends a document; None: its only one of `END_OF_TEXT`. Raises ConfigError, which
    names `key`, if the file cannot be read or has no such token.
    """

    def __init__(self, file: Path, separator: str | None = None, *, key: str = "data.tokenizer"):
        import tokenizers

        try:
            content = file.read_bytes()
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            raise ConfigError(key, file, f"cannot be read: {error.strerror}") from error
        except Exception as error:  # the library raises plain Exceptions
            raise ConfigError(key, file, f"cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.file, self.spec = file, (str(file), separator)
        self.separator, self.prefix = self._find(separator), self._prefix()
        self.vocabulary: int = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.fingerprint = f"{hashlib.sha256(content).hexdigest()} {self.separator}"

    def _find(self, separator: str | None) -> int | None:
        if separator is None:
            known = [found for name in END_OF_TEXT if (found := self._tokenizer.token_to_id(name)) is not None]
            return known[0] if len(known) == 1 else None
        found = self._tokenizer.token_to_id(separator)
        if found is None:
            raise ConfigError("data.separator", separator, f"is no token of {self.file}", allowed=self.special_tokens)
        return found

    @property
    def special_tokens(self) -> Sequence[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def _prefix(self) -> Sequence[int]:
        """The special tokens that it puts before a text; what it puts after one is left to the separator."""
        sample = self._tokenizer.encode("a")
        plain = [place for place, special in enumerate(sample.special_tokens_mask) if not special]
        return tuple(sample.ids[: plain[0]]) if plain else ()

    def encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " tokens"]]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(each.ids, np.uint32) for each in found]

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        return self._tokenizer.decode(tokens.tolist())


def open_codec(tokenizer: str | None, separator: str | None = None) -> Codec:
    """Bytes, or the tokenizer of a file. Raises ConfigError as `Tokenizer` does."""
    if tokenizer is None or tokenizer == BYTES:
        if separator is not None:
            raise ConfigError("data.separator", separator, "belongs to a tokenizer; bytes are separated by NUL")
        return Bytes()
    return Tokenizer(Path(tokenizer).expanduser(), separator)


def require_separator(codec: Codec) -> int:
    """The token that ends a document. Raises ConfigError, which names candidates, if nobody says which that is."""
    if codec.separator is None:
        special = list(codec.special_tokens)
        named = f"its special tokens: {', '.join(special[:20])}{', ...' if len(special) > 20 else ''}"
        problem = f"{codec.file} does not say which token ends a document; name one"
        raise ConfigError("data.separator", None, problem, hint=named if special else "it has no special tokens")
    return codec.separator


def require_room(codec: Codec, vocab_size: int) -> None:
    """Raises ConfigError if a model of that vocabulary cannot take every token."""
    if codec.vocabulary > vocab_size:
        whose = "data are bytes, which have" if codec.file is None else f"{codec.file} has"
        problem, hint = f"{whose} {codec.vocabulary} tokens", f"model.vocab_size={codec.vocabulary}"
        raise ConfigError("model.vocab_size", vocab_size, problem, hint=hint)
