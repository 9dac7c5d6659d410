"""What a run is made of besides its data: the very step that trains, for devices at hand or absent ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

import zoo
from recipes.config import Config
from recipes.data.batches import Batches
from recipes.data.feed import ahead, rows
from recipes.data.sequences import Arrays
from recipes.freeze import frozen
from recipes.optim import make_optimizer
from recipes.placement.masks import canonical_mask
from recipes.placement.resolve import Table, place, resolve
from recipes.placement.settle import check_parts, with_kinds
from recipes.placement.useful import require_gradients_of_layers, require_host_memory
from recipes.sharding.mesh import make_mesh
from recipes.sharding.rules import constrain_batch, shardings
from recipes.step.loss import next_token_loss
from recipes.step.state import Mask, TrainState, cast, init_state, split_state
from recipes.step.train import make_train_step
from zoo.base import Decoder
from zoo.models import INIT_OPTIONS
from zoo.source import Source, fill


class Setup:
    """Table, mesh, optimizer and step of a configuration.

    Without `devices` the mesh is made of those at hand; `devices` of a target (`recipes.plan.compile.devices_of`) make
    a step to compile for them, with `platform` theirs. Raises ConfigError if placement or mesh do not fit.
    """

    config: Config
    table: Table
    mesh: Mesh | None  # None: one device
    frozen: Mask | None
    optimizer: optax.GradientTransformation

    def __init__(self, config: Config, devices: Sequence[Any] | None = None, platform: str | None = None):
        self.config, self._platform = config, platform
        self.mesh = make_mesh(config.mesh, devices) if config.mesh.num_devices > 1 else None
        mask = frozen(config.train.freeze) if config.train.freeze else None
        self.table = _resolve(config, mask)
        self.frozen = mask and canonical_mask(mask)
        self.optimizer = make_optimizer(config.optimizer, config.train.steps)
        if config.placement.state.anything_on_host:
            self._check_state()

    @cached_property
    def step(self) -> Callable:
        """The jitted train step: `(state, batch) -> (state, metrics)`."""
        train = self.config.train
        return make_train_step(
            self.optimizer,
            partial(next_token_loss, balance=train.balance_loss, z_loss=train.z_loss, mtp=train.mtp_loss),
            train.accumulate,
            router_bias_rate=train.router_bias_rate,
            frozen=self.frozen,
            mesh=self.mesh,
            zero=self.config.mesh.zero,
            wide_gradients=train.wide_gradients,
            platform=self._platform,
        )

    def state(self, model: Decoder) -> TrainState:
        """The state before the first step from a canonical float32 model, which it donates."""
        return split_state(self._init(self.place(model)), self.mesh, self.config.mesh.zero)

    def place(self, model: Decoder) -> PyTree:
        """The model in segments, each array split by the mesh."""
        bound = self.config.mesh.expert_bound
        return place(model, self.config.placement, self.mesh, table=self.table, expert_bound=bound)

    def loaded_state(self, source: Source) -> TrainState:
        """The first state with weights that are read, each device its part; those for the host go straight there."""
        model, state = zoo.abstract(self.config.model), self.config.placement.state
        if self.mesh is None and not state.anything_on_host:
            return self.state(fill(source, jnp.float32))
        one = SingleDeviceSharding(jax.devices()[0])
        split = jax.tree.map(lambda _: one, model) if self.mesh is None else shardings(model, self.mesh)
        return self.state(fill(source, jnp.float32, with_kinds(split, model, state)))

    def drawn_state(self) -> TrainState:
        """The first state of a new model, drawn and placed in one program, each device its part."""
        draw = jax.jit(
            lambda key: self.state(zoo.build(self.config.model, key=key)), compiler_options=dict(INIT_OPTIONS)
        )
        return draw(jax.random.key(self.config.train.seed))

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s with their shardings."""
        placed = self.place(zoo.abstract(self.config.model))
        return split_state(jax.eval_shape(self._init, placed), self.mesh, self.config.mesh.zero)

    def _check_state(self) -> None:
        """Raises ConfigError for a state on the host that cannot be, or that cannot help."""
        state, train = self.config.placement.state, self.config.train
        if self._platform is None:
            require_host_memory(jax.devices()[0])
        model = zoo.abstract(self.config.model)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            moments = jax.eval_shape(self.optimizer.init, model)
        check_parts(moments, "optimizer", state)
        if train.accumulate == 1:
            require_gradients_of_layers(model, state)

    def _init(self, placed: PyTree) -> TrainState:
        return init_state(placed, self.optimizer, self.config.train.dtype, frozen=self.frozen)

    def abstract_batch(self) -> dict[str, Any]:
        """A batch of the step as `jax.ShapeDtypeStruct`s with their shardings."""
        config, train = self.config, self.config.train
        shape = (train.batch_size, train.sequence_length + 1)
        batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in config.data.arrays}
        return batch if self.mesh is None else constrain_batch(batch, self.mesh)

    @property
    def everywhere(self) -> NamedSharding | None:
        """The sharding of what every device shall hold whole."""
        return self.mesh and NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def rows(self) -> np.ndarray:
        """The sequences of a batch that this process reads: on a mesh those of its own devices alone."""
        size = self.config.train.batch_size
        if self.mesh is None:
            return np.arange(size)
        leaf = self.abstract_batch()["tokens"]
        parts = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        return np.unique(np.concatenate([np.arange(size)[part[0]] for part in parts]))

    def batch(self, batches: Batches, cursor: int) -> dict[str, Any]:
        """The sequences of one step from `cursor` on."""
        return self._put(batches.read(cursor + self.rows))

    @contextmanager
    def feed(self, batches: Batches, cursor: int, count: int) -> Iterator[Iterator[dict[str, Any]]]:
        """The batches of `count` steps from `cursor` on, read and put on the devices ahead of their steps."""
        size, readers = self.config.train.batch_size, self.config.data.readers
        with rows(batches, cursor, count, size, self.rows, readers) as read, ahead(read, self._put) as fed:
            yield fed

    def _put(self, arrays: Arrays) -> dict[str, Any]:
        if self.mesh is None:
            return {name: jax.device_put(array) for name, array in arrays.items()}

        def part(array: np.ndarray) -> Callable:
            return lambda index: array[np.isin(self.rows, np.arange(self.config.train.batch_size)[index[0]])]

        return {
            name: jax.make_array_from_callback(leaf.shape, leaf.sharding, part(arrays[name]))
            for name, leaf in self.abstract_batch().items()
        }


def _resolve(config: Config, mask: Mask | None) -> Table:
    shape = (config.train.batch_size // config.train.accumulate, config.train.sequence_length)
    model = cast(zoo.abstract(config.model), config.train.dtype)
    apart = None if mask is None else mask(model)
    return resolve(config.placement, model, (jax.ShapeDtypeStruct(shape, jnp.int32),), apart=apart)
