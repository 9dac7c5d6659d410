"""`zoo-verify`: proves that a placement happens and that it changes no gradient."""

import json
from pathlib import Path

from omegaconf import DictConfig

from recipes import schema
from recipes.cli.launch import launch
from recipes.cli.runtime import prepare_jax, require_writable

PROVED, FAILED = 0, 1


def main() -> None:
    """Entry point of `zoo-verify`."""
    launch("zoo-verify", verify, "verify")


def verify(tree: DictConfig) -> int:
    """Prints the report, the worst first, and writes it to `run.json` if asked; 1 if anything does not hold."""
    config, target, options, run = schema.read_verify(tree)
    require_writable("run.json", run.json)
    prepare_jax(run.compile_cache)

    from recipes.placement.resolve import NoEffect
    from recipes.verify.proof import prove

    try:
        proof = prove(config, target, options)
    except NoEffect as error:
        print(f"failed: {error}")
        return FAILED
    if run.json is not None:
        Path(run.json).write_text(json.dumps(proof.to_json()) + "\n")
    print(proof)
    return PROVED if proof.ok else FAILED


if __name__ == "__main__":
    main()
