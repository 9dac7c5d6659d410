"""Placement, sharding, training, proof. Importing this package does not import jax."""

from typing import TYPE_CHECKING

from zoo.lazy import attributes

if TYPE_CHECKING:
    from recipes.evaluation import Evaluation as Evaluation, evaluate as evaluate
    from recipes.freeze import frozen as frozen
    from recipes.optim import OptimizerConfig as OptimizerConfig, make_optimizer as make_optimizer
    from recipes.placement.masks import canonical_mask as canonical_mask
    from recipes.placement.policy import policy as policy
    from recipes.placement.resolve import Table as Table, place as place, resolve as resolve
    from recipes.placement.segments import unplace as unplace
    from recipes.placement.spec import Placement as Placement, StatePlacement as StatePlacement
    from recipes.sample import generate as generate
    from recipes.sharding.config import MeshConfig as MeshConfig
    from recipes.sharding.mesh import make_mesh as make_mesh
    from recipes.step.loss import Loss as Loss, next_token_loss as next_token_loss
    from recipes.step.state import TrainState as TrainState, init_state as init_state
    from recipes.step.train import make_train_step as make_train_step

__getattr__, __dir__ = attributes(
    __name__,
    {
        "recipes.evaluation": ("Evaluation", "evaluate"),
        "recipes.freeze": ("frozen",),
        "recipes.optim": ("OptimizerConfig", "make_optimizer"),
        "recipes.placement.masks": ("canonical_mask",),
        "recipes.placement.policy": ("policy",),
        "recipes.placement.resolve": ("Table", "place", "resolve"),
        "recipes.placement.segments": ("unplace",),
        "recipes.placement.spec": ("Placement", "StatePlacement"),
        "recipes.sample": ("generate",),
        "recipes.sharding.config": ("MeshConfig",),
        "recipes.sharding.mesh": ("make_mesh",),
        "recipes.step.loss": ("Loss", "next_token_loss"),
        "recipes.step.state": ("TrainState", "init_state"),
        "recipes.step.train": ("make_train_step",),
        "recipes.plan": (),
        "recipes.verify": (),
        "recipes.watch": (),
    },
)
