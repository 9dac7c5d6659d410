"""Placement, sharding, training, proof. Importing this package does not import jax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.optim import OptimizerConfig as OptimizerConfig, make_optimizer as make_optimizer
    from recipes.placement.masks import canonical_mask as canonical_mask
    from recipes.placement.policy import policy as policy
    from recipes.placement.resolve import Table as Table, place as place, resolve as resolve
    from recipes.placement.segments import unplace as unplace
    from recipes.placement.spec import Placement as Placement, StatePlacement as StatePlacement
    from recipes.step.loss import Loss as Loss, next_token_loss as next_token_loss
    from recipes.step.state import TrainState as TrainState, init_state as init_state
    from recipes.step.train import make_train_step as make_train_step

_HOMES = {
    "OptimizerConfig": "recipes.optim",
    "make_optimizer": "recipes.optim",
    "canonical_mask": "recipes.placement.masks",
    "policy": "recipes.placement.policy",
    "Table": "recipes.placement.resolve",
    "place": "recipes.placement.resolve",
    "resolve": "recipes.placement.resolve",
    "unplace": "recipes.placement.segments",
    "Placement": "recipes.placement.spec",
    "StatePlacement": "recipes.placement.spec",
    "Loss": "recipes.step.loss",
    "next_token_loss": "recipes.step.loss",
    "TrainState": "recipes.step.state",
    "init_state": "recipes.step.state",
    "make_train_step": "recipes.step.train",
}


def __getattr__(name: str) -> Any:
    if name in ("plan", "verify"):
        return import_module(f"recipes.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module recipes has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
