"""Where the first state of a run comes from, and what is said of it."""

import jax

import zoo
from recipes.config import Config
from recipes.data.batches import Batches
from recipes.data.source import Corpus
from recipes.placement.show import format_bytes
from recipes.plan.memory import state_bytes
from recipes.setup import Setup
from zoo.checks import ConfigError
from zoo.registry import differences
from zoo.source import Source


def open_weights(config: Config) -> Source | None:
    """What the first weights are read from; None if they are drawn. Raises ConfigError if they fit another model."""
    folder = config.train.init_from
    if folder is None:
        return None
    from zoo.convert import open_weights

    source = open_weights(folder)
    if type(source.config) is not type(config.model):
        problem = f"needs a {type(source.config).__name__}, model is a {type(config.model).__name__}"
        raise ConfigError("train.init_from", folder, problem)
    differing = differences(source.config, config.model)
    if differing:
        hint = "its own: " + " ".join(f"model.{name}={own}" for name, (own, _) in differing.items())
        raise ConfigError("train.init_from", folder, "holds a model of other sizes than model", hint=hint)
    for notice in source.notices:
        print(notice)
    return source


def announce(setup: Setup, corpus: Corpus, batches: Batches) -> None:
    """Prints what is about to run."""
    config, mesh = setup.config, setup.config.mesh
    data = "\n".join((str(corpus), *batches.notices))
    print(f"{zoo.count_parameters(config.model):,} parameters, {data}\n\n{setup.table}\n")
    if setup.mesh is None and jax.device_count() > 1:
        print(f"one of {jax.device_count()} devices is used; mesh.fsdp={jax.device_count()} would use all\n")
    if setup.mesh is not None:
        print(f"bytes are those of all {mesh.num_devices} devices together\n")
    if mesh.expert > 1 and hasattr(config.model, "num_experts"):
        print(f"a device sends an expert at most {mesh.expert_bound:g} times the mean load, the rest is dropped\n")
    if config.placement.state.anything_on_host:
        print(f"{state_line(setup)}\n")
    if config.explain:
        print(f"{setup.table.explain()}\n")


def state_line(setup: Setup) -> str:
    """How much of the state lives where, on one device and its host."""
    state = setup.abstract_state()
    words = []
    for place in ("device", "host"):
        parts = [f"{name} {format_bytes(size)}" for name, size in state_bytes(state, place).items() if size]
        words.append(f"on the {place} {', '.join(parts) or 'nothing'}")
    return f"state of a device: {'; '.join(words)}"
