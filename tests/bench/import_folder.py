"""Seconds and memory of `zoo-import` and `zoo-export` on a checkpoint made on the spot.

python -m tests.bench.import_folder      3 GB in bfloat16: a Llama, and a DeepSeek whose experts are most of it
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import zoo
from zoo.deepseek import hf as deepseek
from zoo.llama import hf as llama
from zoo.paths import flat
from zoo.tensors import Spec, write_tensors
from zoo.weights import tensor_specs

CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "Llama 3.2 1B, 20 layers": (llama, "llama3_2_1b", {"num_layers": 20, "tied_embeddings": True}),
    "DeepSeek, 64 experts": (
        deepseek,
        "deepseek_v2_lite",
        {"num_layers": 4, "num_dense_layers": 1, "vocab_size": 20000},
    ),
}


def make(folder: Path, module: Any, name: str, overrides: dict[str, Any]) -> dict[str, Spec]:
    """A Hugging Face folder of random weights; its tensors."""
    config = zoo.config(name, **overrides)
    rules = list(module.rules(config, False))
    shapes = {path: tuple(leaf.shape) for path, leaf in flat(zoo.abstract(config)).items()}
    leaves = {path: Spec(shape, np.dtype(ml_dtypes.bfloat16)) for path, shape in shapes.items()}
    specs = tensor_specs(rules, leaves, ())
    rng = np.random.default_rng(0)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for tensor, spec in specs.items():
            yield tensor, rng.integers(0, 2**15, spec.shape, np.uint16).view(ml_dtypes.bfloat16)

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(module.write_config(config)))
    write_tensors(folder, specs, tensors())
    return specs


def run(*words: str) -> str:
    code = "import sys, resource; from recipes.cli import convert; sys.argv = sys.argv[1:]\n"
    code += "try: {'import': convert.import_main, 'export': convert.export_main}[sys.argv.pop(1)]()\n"
    code += "finally: print(f'peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB')"
    done = subprocess.run([sys.executable, "-c", code, "zoo", *words], capture_output=True, text=True)
    return ", ".join(done.stdout.split("\n")[:-1]) + done.stderr


if __name__ == "__main__":
    for label, (module, name, overrides) in CASES.items():
        with tempfile.TemporaryDirectory() as root:
            specs = make(Path(root) / "hf", module, name, overrides)
            largest = max(specs.values(), key=lambda spec: spec.num_bytes)
            total = sum(spec.num_bytes for spec in specs.values())
            sizes = f"{total / 1e9:.2f} GB in {len(specs)} tensors, the largest {largest.num_bytes / 1e9:.2f} GB"
            print(f"{label}: {sizes}")
            print("  import:", run("import", f"hf={root}/hf", f"out={root}/own"))
            print("  export:", run("export", f"checkpoint={root}/own", f"out={root}/again"))
