"""`zoo-eval`: loss and perplexity of a checkpoint on a text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from recipes import schema
from recipes.cli.launch import launch
from recipes.cli.runtime import prepare_jax, require_extra, require_writable
from recipes.config import EvalConfig
from recipes.data.config import FILES, DataConfig
from recipes.data.tokenizer import Codec
from zoo.checks import ConfigError


def main() -> None:
    """Entry point of `zoo-eval`."""
    launch("zoo-eval", evaluate, "eval")


def evaluate(tree: DictConfig) -> int:
    """Prints the figures and, if there is a prompt, how the model goes on from it; writes `run.json` if asked."""
    from recipes.data.source import with_tokenizer_of
    from recipes.data.tokenizer import open_codec, require_room

    config, data, run = schema.read_eval(tree)
    require_writable("run.json", run.json)
    require_extra("zoo-eval", "hf", "orbax", "tensorstore", "safetensors", "tokenizers")
    data = with_tokenizer_of(config.checkpoint, data)
    codec = open_codec(data.tokenizer, data.separator)
    tokens, counted = _read(data, codec, config)
    prepare_jax(run.compile_cache)

    import jax

    from recipes.evaluation import evaluate as measure
    from recipes.placement.resolve import place
    from recipes.placement.spec import Placement
    from zoo.convert import open_weights
    from zoo.source import fill

    source = open_weights(config.checkpoint)
    require_room(codec, source.config.vocab_size)
    for notice in (*source.notices, *(() if codec.file else ("no tokenizer: one token a byte",))):
        print(notice)
    model = place(fill(source, config.dtype), Placement(default="remat"))
    sizes = {"sequence_length": config.sequence_length, "batch_size": config.batch_size, "batches": config.batches}
    found = measure(model, tokens, counted=counted, **sizes)
    print(found)
    if config.prompt is not None:
        _show_sample(config, model, codec, jax.random.key(config.seed))
    if run.json is not None:
        figures = {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.num_tokens}
        Path(run.json).write_text(json.dumps(figures) + "\n")
    return 0


def _read(data: DataConfig, codec: Codec, config: EvalConfig) -> tuple[np.ndarray, np.ndarray]:
    """The tokens to be looked at, and which of them count."""
    from recipes.data import source

    if data.source in ("synthetic", "mix"):
        problem = (
            "is no text" if data.source == "synthetic" else "is no single text; evaluate its sources by themselves"
        )
        raise ConfigError("data.source", data.source, problem, allowed=("stdlib", *FILES))
    if config.split == "all":
        documents = source.everything(data, codec)
    else:
        documents = getattr(source.load(data, codec.vocabulary).sources[0], config.split)
    most = config.batches * config.batch_size * config.sequence_length + 1 if config.batches else len(documents)
    places = documents.find(np.arange(min(most, len(documents) - 1)))  # nothing follows the last separator
    if len(places[0]) < 2:
        raise ConfigError("data.path", data.path, "holds no two tokens")
    counted = documents.learnt(*places)
    if not counted[1:].any():
        raise ConfigError("data.prompt_field", data.prompt_field, "leaves no token to be counted")
    return documents.tokens(*places), counted


def _show_sample(config: EvalConfig, model: Any, codec: Codec, key: Any) -> None:
    import jax

    from recipes.sample import generate

    prompt: Any = np.asarray([*codec.prefix, *codec.encode([config.prompt or ""])[0]], np.int32)
    if not len(prompt):
        raise ConfigError("prompt", config.prompt, "holds no token")
    extend = jax.jit(
        lambda model, key: generate(model, prompt, config.sample_tokens, temperature=config.temperature, key=key)
    )
    print(codec.decode(np.asarray(extend(model, key))))


if __name__ == "__main__":
    main()
