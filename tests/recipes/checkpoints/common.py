"""A tiny run to save and restore, and what the tests ask of its state."""

from typing import Any

import jax
import numpy as np
from hydra import compose, initialize_config_module

from recipes import schema
from recipes.checkpoints.leaves import is_key, stored
from recipes.config import Config
from recipes.data.batches import train_batches
from recipes.data.source import load
from recipes.setup import Setup

DEEPSEEK = """
model=debug_deepseek model.dim=16 model.num_layers=2 model.num_heads=2 model.query_rank=8 model.kv_rank=8
model.nope_head_dim=4 model.rope_head_dim=4 model.value_head_dim=4 model.mlp_dim=16 model.expert_dim=8
model.num_experts=4 model.router.groups=1 model.router.groups_kept=1 model.vocab_size=32
data=synthetic train.steps=20 train.batch_size=8 train.sequence_length=8 train.accumulate=2
train.router_bias_rate=0.125 train.sample_tokens=0 train.validation_batches=0 optimizer.learning_rate=0.01
""".split()

LLAMA = """
model=debug_llama model.dim=16 model.num_layers=2 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
model.mlp_dim=16 model.vocab_size=32 data=synthetic train.steps=20 train.batch_size=8 train.sequence_length=8
train.sample_tokens=0 train.validation_batches=0
""".split()


def read(*overrides: str) -> tuple[Config, str]:
    """The configuration of `zoo-train`, and as it is written down."""
    from omegaconf import OmegaConf

    schema.register()
    with initialize_config_module("conf", version_base="1.3"):
        tree = compose("config", overrides=["run.dir=unused", "run.compile_cache=null", *overrides])
    return schema.read(tree), OmegaConf.to_yaml(tree, resolve=True)


def setup(*overrides: str, devices: int | None = None) -> Setup:
    """A run, on so many devices."""
    return Setup(read(*overrides)[0], jax.devices()[:devices] if devices else None)


def steps(setup: Setup, state: Any, count: int) -> tuple[Any, list[float]]:
    """The state after `count` more steps on the run's data, and their losses."""
    config, losses = setup.config, []
    corpus = load(config.data, config.model.vocab_size)
    sizes = {"sequence_length": config.train.sequence_length, "vocab_size": config.model.vocab_size}
    batches = train_batches(config.data, corpus, **sizes)
    for _ in range(count):
        state, metrics = setup.step(state, setup.batch(batches, int(state.cursor)))
        losses.append(float(metrics["loss"]))
    return state, losses


def arrays(state: Any) -> dict[tuple[str, str], np.ndarray]:
    """What a checkpoint holds of a state: canonical arrays by folder and path."""
    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(state)]
    whole = [np.asarray(leaf) for leaf in leaves]
    found = stored(state).spots.items()
    return {name: whole[spot.leaf] if spot.row is None else whole[spot.leaf][spot.row] for name, spot in found}


def copied(state: Any) -> Any:
    """The state in memory of its own: a step donates what it is given."""
    return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), leaf.sharding), state)
