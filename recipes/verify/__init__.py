"""Proof that a placement happened and that it changed no numbers."""

from typing import TYPE_CHECKING

from zoo.lazy import attributes

if TYPE_CHECKING:
    from recipes.verify.equivalence import assert_equivalent as assert_equivalent, assert_saved as assert_saved
    from recipes.verify.jaxpr import saved as saved
    from recipes.verify.tracing import Trace as Trace, trace as trace

__getattr__, __dir__ = attributes(
    __name__,
    {
        "recipes.verify.equivalence": ("assert_equivalent", "assert_saved"),
        "recipes.verify.jaxpr": ("saved",),
        "recipes.verify.tracing": ("Trace", "trace"),
    },
)
