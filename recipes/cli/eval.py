"""`zoo-eval`: loss and perplexity of a checkpoint on a text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from recipes import schema
from recipes.cli.launch import launch
from recipes.cli.runtime import prepare_jax, require_extra
from recipes.config import EvalConfig
from recipes.data import bytes as text_bytes
from recipes.data.config import DataConfig
from zoo.checks import ConfigError

TOKENIZER = "tokenizer.json"


def main() -> None:
    """Entry point of `zoo-eval`."""
    launch("zoo-eval", evaluate, "eval")


def evaluate(tree: DictConfig) -> int:
    """Prints the figures and, if there is a prompt, how the model goes on from it; writes `run.json` if asked."""
    config, data, run = schema.read_eval(tree)
    require_extra("zoo-eval", "hf", "orbax", "tensorstore", "safetensors", "tokenizers")
    text = _read_text(data, config.split)
    prepare_jax(run.compile_cache)

    import jax

    from recipes.evaluation import evaluate as measure
    from recipes.placement.resolve import place
    from recipes.placement.spec import Placement
    from zoo.convert import open_weights
    from zoo.source import fill

    source = open_weights(config.checkpoint)
    encode, decode = _codec(source.files.get(TOKENIZER), source.config.vocab_size)
    tokens = encode(text)
    if len(tokens) < 2:
        raise ConfigError("data.path", data.path, "holds no two tokens")
    for notice in source.notices:
        print(notice)
    model = place(fill(source, config.dtype), Placement(default="remat"))
    sizes = {"sequence_length": config.sequence_length, "batch_size": config.batch_size, "batches": config.batches}
    found = measure(model, tokens, **sizes)
    print(found)
    if config.prompt is not None:
        _show_sample(config, model, encode(config.prompt), decode, jax.random.key(config.seed))
    if run.json is not None:
        figures = {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.num_tokens}
        Path(run.json).write_text(json.dumps(figures) + "\n")
    return 0


def _read_text(data: DataConfig, split: str) -> str:
    from recipes.data import source

    if data.source == "synthetic":
        raise ConfigError("data.source", "synthetic", "is no text", allowed=("stdlib", "text"))
    if split == "all":
        documents = source.documents(data)
    else:
        corpus = source.load(data, text_bytes.VOCABULARY)
        documents = getattr(corpus, split).tobytes().removesuffix(bytes([text_bytes.SEPARATOR])).split(b"\0")
    return chr(text_bytes.SEPARATOR).join(document.decode() for document in documents)


def _codec(file: Path | None, vocab_size: int) -> tuple[Callable[[str], np.ndarray], Callable[[Any], str]]:
    """From text to tokens and back: the checkpoint's tokenizer if it has one, else bytes."""
    if file is None:
        if vocab_size < text_bytes.VOCABULARY:
            problem = f"is too small for bytes, and the checkpoint has no {TOKENIZER}"
            raise ConfigError("model.vocab_size", vocab_size, problem)
        print(f"no {TOKENIZER} beside the weights: one token a byte")
        return text_bytes.encode, text_bytes.decode
    from recipes.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(file)
    if tokenizer.vocabulary > vocab_size:
        problem = f"has {tokenizer.vocabulary} tokens, the model {vocab_size}"
        raise ConfigError("tokenizer", file, problem)
    return tokenizer.encode, tokenizer.decode


def _show_sample(config: EvalConfig, model: Any, prompt: Any, decode: Callable[[Any], str], key: Any) -> None:
    import jax

    from recipes.sample import generate

    if not len(prompt):
        raise ConfigError("prompt", config.prompt, "holds no token")
    extend = jax.jit(
        lambda model, key: generate(model, prompt, config.sample_tokens, temperature=config.temperature, key=key)
    )
    print(decode(np.asarray(extend(model, key))))


if __name__ == "__main__":
    main()
