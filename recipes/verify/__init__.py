"""Proof that a placement happened and that it changed no numbers."""

from typing import TYPE_CHECKING

from zoo.lazy import attributes

if TYPE_CHECKING:
    from recipes.verify.comparison import Comparison as Comparison, compare as compare
    from recipes.verify.equivalence import assert_equivalent as assert_equivalent, assert_saved as assert_saved
    from recipes.verify.gradients import (
        Gradients as Gradients,
        check_functions as check_functions,
        check_gradients as check_gradients,
    )
    from recipes.verify.hlo import (
        Compiled as Compiled,
        Subject as Subject,
        check_apart as check_apart,
        check_compiled as check_compiled,
        check_hlo as check_hlo,
    )
    from recipes.verify.jaxpr import saved as saved
    from recipes.verify.tracing import Trace as Trace, trace as trace
    from recipes.verify.versions import Versions as Versions, check_versions as check_versions

__getattr__, __dir__ = attributes(
    __name__,
    {
        "recipes.verify.comparison": ("Comparison", "compare"),
        "recipes.verify.equivalence": ("assert_equivalent", "assert_saved"),
        "recipes.verify.gradients": ("Gradients", "check_functions", "check_gradients"),
        "recipes.verify.hlo": ("Compiled", "Subject", "check_apart", "check_compiled", "check_hlo"),
        "recipes.verify.jaxpr": ("saved",),
        "recipes.verify.tracing": ("Trace", "trace"),
        "recipes.verify.versions": ("Versions", "check_versions"),
    },
)
