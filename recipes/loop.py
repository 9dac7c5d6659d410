"""The run: placement table, steps with progress, validation, sample, picture."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from recipes.checkpoints.resume import describe, find, resumed
from recipes.checkpoints.run import Checkpoints
from recipes.checkpoints.save import NotSaved
from recipes.config import Config
from recipes.data.batches import Batches, train_batches, validation_batches
from recipes.data.source import Corpus
from recipes.data.tokenizer import Codec
from recipes.display import display
from recipes.guards import Guards
from recipes.initial import announce, open_weights
from recipes.listeners import Listeners
from recipes.record import Record
from recipes.sample import generate
from recipes.setup import Setup
from recipes.step.state import TrainState
from recipes.stopping import Stop, stoppable
from recipes.validation import Validation
from recipes.verify.start import may_start, misplaced
from recipes.watch.utilisation import device_memory
from recipes.watch.watching import Watching

DONE, FAILED = 0, 1


class Run(NamedTuple):
    """What the steps of a run need."""

    setup: Setup
    batches: Batches
    validation: Validation
    checkpoints: Checkpoints
    listeners: Listeners
    stop: Stop


def run(config: Config, corpus: Corpus, resolved_config: str) -> int:
    """Trains as the configuration says, from its last checkpoint on if there is one.

    Returns the exit code. Writes `config.yaml`, `metrics.jsonl`, `metrics.png` and events into `run.dir`,
    checkpoints there or into `train.checkpoint_dir`.
    Raises ConfigError before anything is written if the placement, a checkpoint or the weights of `train.init_from` do
    not fit the model or the data is too short.
    """
    sizes = {"sequence_length": config.train.sequence_length, "vocab_size": config.model.vocab_size}
    batches = train_batches(config.data, corpus, **sizes)
    held_out = validation_batches(config.data, corpus, **sizes)
    found = find(config)
    if found is not None and found.step >= config.train.steps:
        print(f"done already: {found.folder}, of train.steps={config.train.steps}; a larger number goes on from there")
        return DONE
    source, setup = open_weights(config) if found is None else None, Setup(config)
    announce(setup, corpus, batches)
    if not may_start(setup):
        return FAILED
    if found is None:
        state = setup.drawn_state() if source is None else setup.loaded_state(source)
    else:
        state = resumed(found, setup)
        print(describe(found, config, resolved_config, corpus.fingerprint))
    folder = config.run.dir if jax.process_index() == 0 else None
    record, watching = Record(folder, resolved_config, int(state.step)), Watching(config, folder, resolved_config)
    checkpoints = Checkpoints(config, resolved_config, corpus, before=record.sync)
    listeners = Listeners([watching, record, display(config.train.steps)])
    try:
        checkpoints.begin(resumes=found is not None)
        with record, stoppable() as stop:
            parts = Run(setup, batches, Validation(setup, held_out), checkpoints, listeners, stop)
            state, code = _train(parts, state)
            if code == DONE:
                _show_sample(setup, state, held_out, corpus.codec)
            watching.report()
            return code
    except NotSaved as error:
        print(error)
    except OSError as error:
        print(f"{error.filename or config.run.dir} cannot be written: {error.strerror}")
    return FAILED


def _compiled(setup: Setup, state: TrainState, batch: Any) -> Callable | str:
    """The compiled step, or what is wrong with it."""
    with _timed("compiled the step"):
        step: Any = setup.step
        traced = step.trace(state, batch)
        problem = misplaced(setup, traced.jaxpr)
        return problem or traced.lower().compile()


def _train(run: Run, state: TrainState) -> tuple[TrainState, int]:
    """Compiles the step and runs all that are left; the second result is the exit code."""
    step = _compiled(run.setup, state, run.setup.batch(run.batches, int(state.cursor)))
    if isinstance(step, str):
        print(step)
        return state, FAILED
    code = FAILED
    run.listeners.begins(int(state.step))
    try:
        left = run.setup.config.train.steps - int(state.step)
        with run.setup.feed(run.batches, int(state.cursor), left) as fed:
            state, code = _steps(run, step, state, fed)
        run.checkpoints.wait()
    finally:
        run.listeners.ends(code)
    return state, code


def _steps(run: Run, step: Callable, state: TrainState, fed: Iterator[Any]) -> tuple[TrainState, int]:
    train, guards = run.setup.config.train, Guards(run.setup.config.train)
    done, cursor = int(state.step), int(state.cursor)
    batch, stops = next(fed), False
    while done < train.steps and not stops:
        run.listeners.starts(done + 1)
        start = time.perf_counter()
        state, device_metrics = step(state, batch)
        batch = next(fed, batch)  # while the device is busy
        metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
        seconds = time.perf_counter() - start
        speed = {"tokens_per_s": train.batch_size * train.sequence_length / seconds, "step_s": seconds}
        row = guards.look({"step": done + 1, **metrics, **speed, **device_memory(), "cursor": cursor})
        run.listeners.step(row)
        done, cursor = done + 1, cursor + train.batch_size
        if (verdict := guards.verdict(row)) is not None:
            print(verdict)
            return state, FAILED
        if run.validation.due(done):
            run.listeners.validated(run.validation.row(state, done))
        stops = run.stop.asked(done)
        if run.checkpoints.due(done, ends=stops or done == train.steps):
            run.listeners.saved(done, str(run.checkpoints.save(state, done)))
    if done < train.steps:
        print(f"stopped after {done} steps")
        return state, run.stop.code
    return state, DONE


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


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{what} in {time.perf_counter() - start:.1f} s")
