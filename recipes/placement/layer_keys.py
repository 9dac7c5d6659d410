"""Keys that name layers: `7`, `0-2`, `6+13+19`, `last`. Free of jax."""

from zoo.checks import ConfigError


def layer_numbers(key: str, num_layers: int, entry: str = "placement.layers") -> frozenset[int]:
    """The layers that a key names: `layer_numbers("0-2", 8)` is {0, 1, 2}. Raises ConfigError if one does not exist.

    `entry` is what the message names.
    """
    numbers: set[int] = set()
    for ends in parse(key, entry):
        first, last = (num_layers - 1 if end == "last" else int(end) for end in ends)
        if max(first, last) >= num_layers:
            raise ConfigError(entry, key, f"the model has layers 0 to {num_layers - 1}")
        if first > last:
            raise ConfigError(entry, key, f"runs backwards: the last layer is {num_layers - 1}")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def parse(key: str, entry: str) -> list[tuple[str, str]]:
    """The (first, last) of each part of `0-2+5+last`. Raises ConfigError for a key of another form."""
    ranges = []
    for part in key.split("+"):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end == "last" or (end.isascii() and end.isdigit()) for end in ends):
            raise ConfigError(entry, key, "not a set of layers", hint="write 7, 0-2, 6+13+19 or last")
        if all(end != "last" for end in ends) and int(ends[0]) > int(ends[1]):
            raise ConfigError(entry, key, "runs backwards", hint=f"write {ends[1]}-{ends[0]}")
        ranges.append(ends)
    return ranges
