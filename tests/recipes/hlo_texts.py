"""Compiles a step that is not ours with the jax at hand, right or wrong, and writes the programs that the tests read.

    PYTHONPATH=. python -m tests.recipes.hlo_texts cuda right      # jax 0.12.0.1, jax-cuda13-plugin, jax-cuda13-pjrt
    PYTHONPATH=. python -m tests.recipes.hlo_texts tpu right       # with libtpu

`tests/data/hlo/<platform>_<version>_<variant>.txt` is the compiler's text without the tables of source lines, settings
and names that no check reads, and without the computations that have nothing to do with the host. That of 0.11.0 is the
right step as a wrong compiler made it: such a version goes into an environment of its own (with hydra-core, jaxtyping,
equinox and einops, for the target).
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import numpy as np
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from recipes.plan.targets import Target
from tests.recipes import own_step

FOLDER = Path(__file__).parent.parent / "data" / "hlo"
OPTIONS = {"xla_disable_hlo_passes": "rematerialization,simplify-while-loops"}
CUDA = OPTIONS | {"xla_gpu_autotune_level": 0}
UNREAD = re.compile(
    r' (?:scheduling_name="[^"]*"|stack_frame_id=\d+)|, (?:frontend_attributes={fingerprint[^}]*}|sharding={[^ ]*})'
)
SLICE = re.compile(r'"dynamic_slice_config":{(?:[^{}]|{[^{}]*})*}')


def devices(platform: str) -> Any:
    if platform == "tpu":
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    xla_bridge.discover_pjrt_plugins()
    config = Target.named("h200").xla_config()
    return topologies.get_topology_desc("h200", platform="cuda", target_config=config, topology="1x1x1").devices


def on_host(lowered: Any, args: Any) -> None:
    """CUDA devices that are not there report no memories, and jax drops the kind of such arguments: set it again."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(args)]
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(each for each in module.body.operations if "main" in str(each.attributes["sym_name"]))
        kinds = []
        for path, attributes in zip(paths, ir.ArrayAttr(main.arg_attrs), strict=True):
            given = {each.name: each.attr for each in ir.DictAttr(attributes)}
            kind = "pinned_host" if "momenta" in path else "device"
            kinds.append(ir.DictAttr.get(given | {"mhlo.memory_kind": ir.StringAttr.get(kind)}))
        main.arg_attrs = ir.ArrayAttr.get(kinds)


def text(platform: str, variant: str) -> str:
    one = NamedSharding(Mesh(np.array(devices(platform)[:1]), ("device",)), PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), own_step.arguments())
    lowered = jax.jit(own_step.make_step(variant)).lower(*args)
    if variant == "whole state" and platform == "cuda":
        on_host(lowered, args)
    return str(lowered.compile(compiler_options=CUDA if platform == "cuda" else OPTIONS).as_text())


def without_unread(hlo: str) -> str:
    """The instructions, with the metadata and settings that a check reads."""

    def settings(line: str) -> str:
        head, found, tail = line.partition(", backend_config={")
        kept = SLICE.search(tail)
        return head + (f", backend_config={{{kept[0]}}}" if kept else "") if found else line

    lines = [settings(UNREAD.sub("", line)) for line in hlo.splitlines()]
    lines = [line if "slice" in line else re.sub(r", metadata={[^}]*}", "", line) for line in lines]
    computations = re.findall(r"^(?:%|ENTRY).*?^}", "\n".join(lines), re.DOTALL | re.MULTILINE)
    kept = [each for each in computations if "S(5)" in each or each.startswith("ENTRY")]
    return "\n\n".join([lines[0], *kept]) + "\n"


if __name__ == "__main__":
    platform, variant = sys.argv[1:]
    file = FOLDER / f"{platform}_{jax.__version__}_{variant.replace(' ', '_')}.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    file.write_text(without_unread(text(platform, variant)))
