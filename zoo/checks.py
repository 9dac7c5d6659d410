"""Errors and checks of configurations. Free of jax, so that a bad configuration is reported at once."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

MAX_LAYERS = 10_000  # more would be built for hours
MAX_INTEGER = 2**63 - 1


class ConfigError(ValueError):
    """A configuration that cannot be: names the key and value, what is allowed and the nearest match."""

    def __init__(
        self, key: str, value: object, problem: str, *, allowed: Iterable[str] = (), name: str = "", hint: str = ""
    ):
        """`name` is the misspelt word if it is not the value."""
        allowed = list(allowed)
        lines = [f"{key}={value}: {problem}"]
        near = difflib.get_close_matches(name or str(value), allowed, n=3, cutoff=0.6)
        if near:
            lines.append(f"did you mean {' or '.join(near)}?")
        if allowed:
            lines.append(f"allowed: {', '.join(allowed)}")
        if hint:
            lines.append(hint)
        super().__init__("\n".join(lines))

    def with_hint(self, hint: str) -> "ConfigError":
        """The same error with another line."""
        error = ConfigError("", "", "")
        error.args = (f"{self}\n{hint}",)
        return error


def require_positive(prefix: str, config: Any, *names: str) -> None:
    """Raises ConfigError unless each named field is above zero."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{prefix}.{name}", value, "must be above zero")


def require_not_negative(prefix: str, config: Any, *names: str) -> None:
    """Raises ConfigError if a named field is below zero."""
    for name in names:
        if getattr(config, name) < 0:
            raise ConfigError(f"{prefix}.{name}", getattr(config, name), "must not be negative")


def require_at_most(most: int, prefix: str, config: Any, *names: str) -> None:
    """Raises ConfigError if a named field is above `most`."""
    for name in names:
        if getattr(config, name) > most:
            raise ConfigError(f"{prefix}.{name}", getattr(config, name), f"must be at most {most}")


def require_choice(key: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises ConfigError unless `value` is one of the allowed words."""
    allowed = list(allowed)
    if value not in allowed:
        raise ConfigError(key, value, "is not one of the allowed words", allowed=allowed)


def require_divisible(prefix: str, config: Any, name: str, by: str) -> None:
    """Raises ConfigError unless field `name` is a multiple of field `by`."""
    value, divisor = getattr(config, name), getattr(config, by)
    if value % divisor:
        raise ConfigError(f"{prefix}.{name}", value, f"must be divisible by {by}={divisor}")


def flat_fields(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a configuration, nested ones as `rope.theta`."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= flat_fields(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def from_fields(kind: type, fields: Mapping[str, Any], prefix: str) -> Any:
    """The dataclass `kind` from plain fields; a mapping becomes the nested dataclass of its field, if it is one.

    Raises ConfigError for a field that `kind` has not; `prefix` is where the fields stand in the configuration.
    """
    allowed: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(kind)}
    values = {}
    for name, value in fields.items():
        key = f"{prefix}.{name}" if prefix else name
        if name not in allowed:
            raise ConfigError(key, value, f"{kind.__name__} has no such field", allowed=allowed, name=name)
        values[name] = _fit(key, value, allowed[name])
    return kind(**values)


def _fit(key: str, value: Any, wanted: Any) -> Any:
    """`value` as the type of its field: a mapping becomes a dataclass, an integer a float; else ConfigError.

    Not a number and infinity are no values of any field.
    """
    kinds = _classes(wanted)
    if dataclasses.is_dataclass(kinds[0]) and isinstance(value, Mapping):
        return from_fields(kinds[0], value, key)
    if type(value) is int and abs(value) > MAX_INTEGER:
        raise ConfigError(key, value, "must fit into 64 bits")
    if type(value) is int and float in kinds:
        return float(value)
    if kinds[0] is tuple and isinstance(value, list):
        return tuple(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, value, "must be a finite number")
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = [kind.__name__ if kind is not types.NoneType else "null" for kind in kinds]
        raise ConfigError(key, value, f"must be of type {' or '.join(names)}")
    return value


def _classes(annotation: Any) -> tuple[type, ...]:
    """`int | None` as (int, NoneType), `Mapping[str, str]` as (Mapping,)."""
    if isinstance(annotation, types.UnionType):
        return tuple(typing.get_origin(each) or each for each in typing.get_args(annotation))
    return (typing.get_origin(annotation) or annotation,)
