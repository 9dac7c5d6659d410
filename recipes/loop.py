"""The run: placement table, steps with progress, validation, sample, picture."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

import zoo
from recipes.config import Config
from recipes.data.batches import Batches, train_batches, validation_batches
from recipes.data.source import Corpus
from recipes.data.tokenizer import Codec
from recipes.display import progress
from recipes.record import Record
from recipes.sample import generate
from recipes.setup import Setup
from recipes.step.loss import Loss, next_token_loss
from recipes.step.state import TrainState
from recipes.verify.start import may_start, misplaced
from zoo.checks import ConfigError
from zoo.source import Source

DONE, FAILED, INTERRUPTED = 0, 1, 130


def run(config: Config, corpus: Corpus, resolved_config: str) -> int:
    """Trains as the configuration says and returns the exit code.

    Writes `config.yaml`, `metrics.jsonl` and `loss.png` into `run.dir`. Raises ConfigError before anything is written
    if the placement or the weights of `train.init_from` do not fit the model or the data is too short.
    """
    sizes = {"sequence_length": config.train.sequence_length, "vocab_size": config.model.vocab_size}
    batches = train_batches(config.data, corpus, **sizes)
    held_out = validation_batches(config.data, corpus, **sizes)
    source, setup = _open_weights(config), Setup(config)
    _announce(setup, corpus, batches)
    if not may_start(setup):
        return FAILED
    record = Record(config.run.dir if jax.process_index() == 0 else None, resolved_config)
    state = setup.drawn_state() if source is None else setup.loaded_state(source)
    losses: list[float] = []
    validation: tuple[int, float] | None = None
    code = INTERRUPTED
    with record:
        try:
            state, failed = _steps(setup, state, batches, record, losses)
            if failed is None:
                code = DONE
                validation = _validate(setup, state, held_out, record)
                _show_sample(setup, state, held_out, corpus.codec)
            else:
                code = FAILED
                print(failed)
        except KeyboardInterrupt:
            print(f"stopped after {len(losses)} steps")
        record.plot(losses, validation, f"{type(config.model).__name__.removesuffix('Config')}")
    return code


def _open_weights(config: Config) -> Source | None:
    """What the first weights are read from; None if they are drawn. Raises ConfigError if they fit another model."""
    folder = config.train.init_from
    if folder is None:
        return None
    from zoo.convert import open_weights

    source = open_weights(folder)
    if type(source.config) is not type(config.model):
        problem = f"needs a {type(source.config).__name__}, model is a {type(config.model).__name__}"
        raise ConfigError("train.init_from", folder, problem)
    found, asked = _leaves(source.config), _leaves(config.model)
    weights = found.keys() - {"init_std", "capacity_factor"}  # the others are of training
    differing = [name for name in weights if found[name] != asked[name]]
    if differing:
        hint = "its own: " + " ".join(f"model.{name}={found[name]}" for name in sorted(differing))
        raise ConfigError("train.init_from", folder, "holds a model of other sizes than model", hint=hint)
    for notice in source.notices:
        print(notice)
    return source


def _leaves(config: Any) -> dict[str, Any]:
    """The fields of a configuration, nested ones as `rope.theta`."""
    fields = dataclasses.asdict(config)
    nested = {
        f"{name}.{key}": v for name, value in fields.items() if isinstance(value, dict) for key, v in value.items()
    }
    return nested | {name: value for name, value in fields.items() if not isinstance(value, dict)}


def _announce(setup: Setup, corpus: Corpus, batches: Batches) -> None:
    """What is about to run."""
    config, mesh = setup.config, setup.config.mesh
    data = "\n".join((str(corpus), *batches.notices))
    print(f"{zoo.count_parameters(config.model):,} parameters, {data}\n\n{setup.table}\n")
    if setup.mesh is None and jax.device_count() > 1:
        print(f"one of {jax.device_count()} devices is used; mesh.fsdp={jax.device_count()} would use all\n")
    if setup.mesh is not None:
        print(f"bytes are those of all {mesh.num_devices} devices together\n")
    if mesh.expert > 1 and hasattr(config.model, "num_experts"):
        print(f"a device sends an expert at most {mesh.expert_bound:g} times the mean load, the rest is dropped\n")
    if config.explain:
        print(f"{setup.table.explain()}\n")


def _steps(
    setup: Setup, state: TrainState, batches: Batches, record: Record, losses: list[float]
) -> tuple[TrainState, str | None]:
    """Runs all steps; the second result says what went wrong, if anything did. Appends to `losses` as it goes."""
    train = setup.config.train
    batch = setup.batch(batches, 0)
    with _timed("compiled the step"):
        step: Any = setup.step
        traced = step.trace(state, batch)
        problem = misplaced(setup, traced.jaxpr)
        if problem is not None:
            return state, problem
        step = traced.lower().compile()
    with progress(train.steps) as display, setup.feed(batches, 0, train.steps) as fed:
        batch = next(fed)
        for number in range(1, train.steps + 1):
            start = time.perf_counter()
            state, device_metrics = step(state, batch)
            batch = next(fed, batch)  # while the device is busy
            metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
            seconds = time.perf_counter() - start
            tokens_per_s = train.batch_size * train.sequence_length / seconds
            row = {"step": number, **metrics, "tokens_per_s": tokens_per_s, "step_s": seconds}
            record.row(row)
            if not math.isfinite(metrics["loss"]):
                return state, _diverged(number, metrics)
            losses.append(metrics["loss"])
            display.step(row)
    return state, None


def _validate(setup: Setup, state: TrainState, batches: Batches, record: Record) -> tuple[int, float] | None:
    """`(step, loss)` over the first batches of the held-out text, None if none were asked for."""
    train = setup.config.train
    if not train.validation_batches:
        return None
    evaluate: Callable[..., Loss] = jax.jit(partial(next_token_loss, mtp=0.0))
    count = train.validation_batches
    if batches.num_sequences is not None:
        count = min(count, -(-batches.num_sequences // train.batch_size))
    results = [evaluate(state.params, setup.batch(batches, number * train.batch_size)) for number in range(count)]
    loss = float(sum(result.total for result in results) / sum(result.weight for result in results))
    record.row({"step": train.steps, "validation_loss": loss})
    print(f"validation loss {loss:.4f} nats a token, perplexity {math.exp(loss):.3f}")
    return train.steps, loss


def _show_sample(setup: Setup, state: TrainState, batches: Batches, codec: Codec) -> None:
    """Prints how the model goes on from the beginning of the held-out text."""
    config = setup.config
    length, window = config.train.sample_tokens, config.train.sequence_length
    if not length or config.data.source == "synthetic":
        return
    prompt = batches.sequence(0)[: max(1, min(64, window // 2))]
    extend = jax.jit(generate, static_argnums=2, out_shardings=setup.everywhere)
    text = extend(state.params, prompt, min(length, max(1, window - len(prompt))))
    prompt, rest = np.split(np.asarray(text), [len(prompt)])
    print(f"sample, going on from the held-out text at |:\n{codec.decode(prompt)}|{codec.decode(rest)}\n")


def _diverged(step: int, metrics: dict[str, float]) -> str:
    rate = metrics.get("learning_rate", math.nan)
    return (
        f"loss {metrics['loss']} at step {step}: learning rate {rate:.2e}, gradient norm {metrics['grad_norm']:.3g}\n"
        "try a lower optimizer.learning_rate, a longer optimizer.warmup_fraction, a smaller optimizer.clip_norm, "
        "or train.dtype=float32"
    )


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{what} in {time.perf_counter() - start:.1f} s")
