"""Watching a run: its log, pictures, events, traces, stalls. Importing this package does not import jax."""

from typing import TYPE_CHECKING

from zoo.lazy import attributes

if TYPE_CHECKING:
    from recipes.watch.events import Events as Events
    from recipes.watch.history import History as History
    from recipes.watch.picture import plot as plot
    from recipes.watch.profile import Profile as Profile
    from recipes.watch.stall import Watchdog as Watchdog
    from recipes.watch.summary import Device as Device, summarise as summarise
    from recipes.watch.utilisation import device_memory as device_memory, training_flops as training_flops

__getattr__, __dir__ = attributes(
    __name__,
    {
        "recipes.watch.events": ("Events",),
        "recipes.watch.history": ("History",),
        "recipes.watch.picture": ("plot",),
        "recipes.watch.profile": ("Profile",),
        "recipes.watch.stall": ("Watchdog",),
        "recipes.watch.summary": ("Device", "summarise"),
        "recipes.watch.utilisation": ("device_memory", "training_flops"),
    },
)
