"""Packages that load a module when a name of it is first asked for, so that importing them imports no jax."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attributes(
    package: str, homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package; `homes` holds each module's names, or none: the module itself."""
    found = {name: module for module, names in homes.items() for name in names}
    modules = {module.rpartition(".")[2]: module for module, names in homes.items() if not names}

    def get(name: str) -> Any:
        if name in found:
            return getattr(import_module(found[name]), name)
        if name in modules:
            return import_module(modules[name])
        raise AttributeError(f"module {package} has no attribute {name}")

    return get, lambda: sorted(found | modules)
