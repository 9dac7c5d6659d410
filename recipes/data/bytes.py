"""Text as tokens: one token a byte of UTF-8."""

import numpy as np
from jaxtyping import Integer, UInt8

SEPARATOR = 0
"""The token that ends a document; texts do not hold this byte."""

VOCABULARY = 256
"""Tokens that a byte can be."""

_NOT_UTF8 = 0xFF


def encode(text: str) -> UInt8[np.ndarray, " tokens"]:
    """The bytes of `text`, read-only. Raises UnicodeEncodeError for a lone surrogate."""
    return np.frombuffer(text.encode(), np.uint8)


def decode(tokens: Integer[np.ndarray, " tokens"]) -> str:
    """The text of `tokens`: a separator shows as a newline, what is not UTF-8 or not a byte as U+FFFD."""
    shown = np.where(tokens == SEPARATOR, ord("\n"), tokens)
    shown = np.where((shown < 0) | (shown >= VOCABULARY), _NOT_UTF8, shown)
    return shown.astype(np.uint8).tobytes().decode(errors="replace")
