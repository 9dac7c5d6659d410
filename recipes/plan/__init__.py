"""What a program needs on hardware that is not there. Importing this package does not import jax."""

from typing import TYPE_CHECKING

from zoo.lazy import attributes

if TYPE_CHECKING:
    from recipes.plan.compile import compile_for as compile_for, devices_of as devices_of
    from recipes.plan.pricing import price as price
    from recipes.plan.record import Plan as Plan
    from recipes.plan.targets import Target as Target

__getattr__, __dir__ = attributes(
    __name__,
    {
        "recipes.plan.compile": ("compile_for", "devices_of"),
        "recipes.plan.pricing": ("price",),
        "recipes.plan.record": ("Plan",),
        "recipes.plan.targets": ("Target",),
    },
)
