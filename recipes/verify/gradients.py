"""The third check: a placement changes no number, on the device at hand."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from recipes.config import Config
from recipes.data.sequences import segments
from recipes.flags import compiler_options
from recipes.placement.segments import ON_DEVICE, replace_places, replace_state, unplace
from recipes.setup import Setup
from recipes.sharding.rules import constrain_batch
from recipes.step.state import TrainState, places_of, settled_state
from recipes.verify.arguments import StateArray, check_kinds
from recipes.verify.comparison import Comparison, compare

# Against the program that keeps everything on the device: recomputed arrays take part in other fusions, which sum in
# another order. float32: some hundred operations in a row, each rounded to 2^-24, and a softmax's derivative subtracts
# numbers that nearly cancel; measured: 1e-6 (two layers of debug_deepseek). bfloat16: the same, rounded to 2^-9.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Gradients:
    """What became of the numbers.

    - `twin`: loss and gradients of the first step against the same program with every host cell on the device, bit for
      bit; `device`: against the program that keeps every cell on the device, within a tolerance.
    - `states`: parameters, moments, routing biases, counters and gradients after each step, against the twin's.
    - `kinds`: the memory that each array of the state is in, before the first step and after each.

    The twin has the state on the device too.
    """

    twin: Comparison
    device: Comparison
    states: tuple[Comparison, ...]
    layers: int
    sequence: int
    kinds: tuple[StateArray, ...] = ()

    @property
    def ok(self) -> bool:
        return all(each.ok for each in (self.twin, self.device, *self.states, *self.kinds))

    @property
    def first_wrong(self) -> Comparison | None:
        """The first comparison that fails."""
        return next((each for each in (self.twin, *self.states, self.device) if not each.ok), None)

    @property
    def worst(self) -> float:
        """The largest difference of the first comparison that fails; 0 if all hold."""
        return 0.0 if self.first_wrong is None else self.first_wrong.worst

    @property
    def worst_leaf(self) -> str:
        return "" if self.first_wrong is None else self.first_wrong.worst_leaf

    def __str__(self) -> str:
        from recipes.verify.report import show_gradients

        return show_gradients(self)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, maps and numbers."""
        from recipes.verify.report import gradients_json

        return gradients_json(self)


def check_functions(fn: Callable, twin: Callable, *args: Any, tolerance: float = 0.0) -> Comparison:
    """Compares what two functions of the same arguments give, such as loss and gradients, or a train step's results.

    Both run on the device at hand with the train step's compiler options. With a tolerance of 0 every bit has to agree.
    """

    def result(fn: Callable) -> PyTree:
        return jax.tree.map(np.asarray, jax.jit(fn, compiler_options=compiler_options())(*args))

    return compare(result(fn), result(twin), tolerance)


def check_gradients(config: Config, steps: int = 2) -> Gradients:
    """Runs the very step of a configuration for some steps on random tokens, its twin and the all-device program.

    Raises ConfigError if placement or mesh do not fit the model or the devices.
    """
    setup = Setup(config)
    setup.optimizer = recording(setup.optimizer)
    state, batches = setup.drawn_state(), list(_batches(setup, steps))
    kinds = list(check_kinds(state, places_of(state)))
    hosted = setup.table.place_bytes("host") > 0 or config.placement.state.anything_on_host
    places = {cell.place for row in setup.table.layers for cell in row.values()} - {None}

    def run(change: Callable[[str], str], count: int) -> list[PyTree]:
        twin = replace_state(replace_places(_copied(state), change), ON_DEVICE)
        return list(_run(setup, settled_state(twin), batches[:count]))

    placed = list(_run(setup, _copied(state), batches, kinds))
    twin = run(lambda place: "device" if place == "host" else place, steps) if hosted else placed
    device = run(lambda _: "device", 1)[0] if places != {"device"} else placed[0]
    tolerance = TOLERANCES[config.train.dtype]
    return Gradients(
        twin=compare(_gradients(placed[0]), _gradients(twin[0])),
        device=compare(_gradients(placed[0]), _gradients(device), tolerance),
        states=tuple(map(compare, placed, twin)),
        layers=config.model.num_layers,
        sequence=config.train.sequence_length,
        kinds=tuple(kinds),
    )


class Recorded(NamedTuple):
    """State of an optimizer that also keeps the last gradients."""

    gradients: PyTree
    inner: PyTree


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, whose state shows the gradients that it was last given, as float32."""

    def init(params: PyTree) -> Recorded:
        return Recorded(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params), optimizer.init(params))

    transform = optax.with_extra_args_support(optimizer)

    def update(updates: PyTree, state: Any, params: PyTree = None, **more: Any) -> tuple[PyTree, Recorded]:
        changed, inner = transform.update(updates, state.inner, params, **more)
        return changed, Recorded(updates, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _run(
    setup: Setup, state: TrainState, batches: list[Mapping[str, Any]], kinds: list[StateArray] | None = None
) -> Iterator[PyTree]:
    """After each step the canonical state and the metrics, as NumPy arrays; `kinds` collects where arrays are."""
    places = places_of(state)
    for batch in batches:
        state, metrics = setup.step(state, batch)
        if kinds is not None:
            kinds += check_kinds(state, places)
        yield {"state": unplace(jax.tree.map(np.asarray, state)), "metrics": jax.tree.map(np.asarray, metrics)}


def _gradients(after: PyTree) -> PyTree:
    return {"loss": after["metrics"]["loss"], "gradients": after["state"].opt_state.gradients}


def _batches(setup: Setup, steps: int) -> Iterator[Mapping[str, Any]]:
    """Random tokens, the same in every run."""
    abstract, vocabulary = setup.abstract_batch(), setup.config.model.vocab_size
    for number in range(steps):
        draw = np.random.default_rng((setup.config.train.seed, number))
        tokens = draw.integers(0, vocabulary, abstract["tokens"].shape, np.int32)
        learnt = draw.integers(0, 2, tokens.shape, np.int32)
        possible: Any = {"tokens": tokens, **segments(tokens), "loss_mask": learnt}
        batch: Any = {name: jnp.asarray(possible[name]) for name in abstract}
        yield batch if setup.mesh is None else constrain_batch(batch, setup.mesh)


def _copied(state: TrainState) -> TrainState:
    """A step donates its state."""
    return jax.tree.map(jnp.copy, state)
