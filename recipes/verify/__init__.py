"""Proof that a placement happened and that it changed no numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.verify.equivalence import assert_equivalent as assert_equivalent, assert_saved as assert_saved
    from recipes.verify.jaxpr import saved as saved

_HOMES = {
    "assert_equivalent": "recipes.verify.equivalence",
    "assert_saved": "recipes.verify.equivalence",
    "saved": "recipes.verify.jaxpr",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module recipes.verify has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)
