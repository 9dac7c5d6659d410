"""All checks of a run's own step, one after another, and what they say together."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

import zoo
from recipes.config import Config
from recipes.placement.gradients import landing_on_host
from recipes.plan.memory import local_bytes
from recipes.setup import Setup
from recipes.sharding.config import MeshConfig
from recipes.step.state import TrainState, split_trainable
from recipes.verify.arguments import arguments_of
from recipes.verify.config import VerifyConfig
from recipes.verify.gradients import Gradients, check_gradients
from recipes.verify.hlo import Compiled, Subject, check_apart, check_hlo
from recipes.verify.shrink import shrink
from recipes.verify.tracing import Trace, trace
from recipes.verify.versions import Versions, check_versions
from zoo.checks import ConfigError

if TYPE_CHECKING:
    from recipes.plan.targets import Target

# Float32 arrays of the size of the model that the gradient check holds at a time, at least: the first state, the one of
# the run (parameters, gradients, two moments each), and NumPy copies of states to compare.
_COPIES = 12


@dataclass(frozen=True)
class Proof:
    """The reports; `compiled` is None where nothing was compiled for an accelerator, `gradients` where nothing ran."""

    versions: Versions
    trace: Trace | None
    compiled: Compiled | None
    gradients: Gradients | None

    @property
    def checks(self) -> dict[str, Any]:
        """Name -> report of the checks that were made."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: report for name, report in named.items() if report is not None}

    @property
    def ok(self) -> bool:
        return self.trace is not None and all(report.ok for report in self.checks.values())

    def __str__(self) -> str:
        from recipes.verify.report import show_proof

        return show_proof(self)

    def to_json(self) -> dict[str, Any]:
        """`ok` and the reports, null where a check was not made."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"ok": self.ok} | {name: report and report.to_json() for name, report in named.items()}


def prove(config: Config, target: "Target | None" = None, options: VerifyConfig | None = None) -> Proof:
    """Checks the very step that `config` trains with: traced, compiled for the target, run on the device at hand.

    Without a target the step is compiled for the device at hand if that is an accelerator. Raises ConfigError if
    placement, mesh or devices do not fit, or the model that is to run does not fit the memory.
    """
    options = VerifyConfig() if options is None else options
    table = Setup(dataclasses.replace(config, mesh=MeshConfig())).table
    small = shrink(config, table, options.layers, options.sequence) if options.gradients else None
    if small is not None:
        small = _at_hand(small)
        _require_memory(small)
    platform = (target and target.compiler) or jax.default_backend()
    hosted = table.place_bytes("host") > 0 or config.placement.state.anything_on_host
    versions = check_versions(platform, hosted, config.accept)
    if not versions.ok:
        return Proof(versions, None, None, None)
    if target is None:
        traced, compiled = _here(config)
    else:
        traced, compiled = check_apart(subject, config, target, target=target, timeout_s=options.timeout_s)
    return Proof(versions, traced, compiled, small and check_gradients(small, options.steps))


def subject(config: Config, target: "Target") -> Subject:
    """The step of a configuration over as many devices of a target as its mesh has."""
    from recipes.plan.compile import devices_of

    devices = config.mesh.num_devices
    absent = devices_of(target, devices) if devices > 1 else None
    setup = Setup(config, absent, target.compiler)
    state = setup.abstract_state()
    return Subject(setup.step, (state, setup.abstract_batch()), setup.table, devices, gradient_bytes(setup, state))


def gradient_bytes(setup: Setup, state: TrainState) -> int:
    """Bytes of the gradients that the placement asks for on the host of a device, with the sums of micro-batches."""
    trainable = split_trainable(state.params, setup.frozen)[0]
    hosted = landing_on_host(trainable, state.params)
    sums = 4 * sum(local_bytes(leaf) // leaf.dtype.itemsize for leaf in hosted)
    return sum(map(local_bytes, hosted)) + (sums if setup.config.train.accumulate > 1 else 0)


def _here(config: Config) -> tuple[Trace, Compiled | None]:
    """The step on the devices at hand; compiled if these have a host beside them."""
    setup = Setup(config)
    args = setup.abstract_state(), setup.abstract_batch()
    traced = trace(setup.step, *args, asked=setup.table)
    if jax.default_backend() == "cpu":
        return traced, None
    return traced, compiled_here(setup.step, args, traced, gradient_bytes(setup, args[0]))


def compiled_here(step: Callable, args: tuple, traced: Trace, gradient_bytes: int = 0) -> Compiled:
    """Compiles a jitted step for the devices at hand and reads the program; `gradient_bytes`: see `check_hlo`."""
    lowered: Any = step.lower(*args)  # type: ignore[attr-defined]
    compiled = lowered.compile()
    return check_hlo(
        compiled.as_text(),
        traced,
        devices=max((len(leaf.sharding.device_set) for leaf in jax.tree.leaves(args) if leaf.sharding), default=1),
        host_temp_bytes=compiled.memory_analysis().host_temp_size_in_bytes,
        gradient_bytes=gradient_bytes,
        arguments=arguments_of(lowered, args),
    )


def _at_hand(config: Config) -> Config:
    """On one device, with one sequence a micro-batch, where the mesh needs more devices than there are."""
    if config.mesh.num_devices <= jax.device_count():
        return config
    train = dataclasses.replace(config.train, batch_size=config.train.accumulate)
    return dataclasses.replace(config, mesh=MeshConfig(), train=train)


def _require_memory(config: Config) -> None:
    needed = 4 * _COPIES * zoo.count_parameters(config.model)
    limits = jax.devices()[0].memory_stats() or {}  # none on the CPU
    have = limits.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > have:
        problem = f"running the step takes {needed / 1e9:.0f} GB, there are {have / 1e9:.0f}"
        hint = "layers=2 or fewer model dims make it small, gradients=false leaves this check out"
        raise ConfigError("gradients", True, problem, hint=hint)
