"""What a run checks before its first step."""

import dataclasses
from typing import Any

import jax

from recipes.config import Config
from recipes.setup import Setup
from recipes.verify.gradients import check_gradients
from recipes.verify.residuals import residuals
from recipes.verify.shrink import num_rows, shrink
from recipes.verify.tracing import judge
from recipes.verify.versions import check_versions

_SEQUENCE = 64  # tokens of the small model whose gradients are checked


def may_start(setup: Setup) -> bool:
    """Whether the run can start; prints why not.

    It cannot under a compiler that is known to be wrong, nor, with `verify=true`, if a small model's gradients differ.
    """
    config = setup.config
    hosted = setup.table.place_bytes("host") > 0 or config.placement.state.anything_on_host
    versions = check_versions(jax.default_backend(), hosted, config.accept)
    if versions.problems or versions.notes:
        print(versions)
    if not versions.ok or config.verify != "true":
        return versions.ok
    gradients = check_gradients(_small(setup), steps=1)
    print(f"{gradients}\n" if gradients.ok else f"{gradients}\nthe placement changes gradients; verify=trace trains on")
    return gradients.ok


def misplaced(setup: Setup, program: Any) -> str | None:
    """What the traced step does not keep as the table says, None if all is well or nothing is to be checked."""
    if setup.config.verify == "false":
        return None
    report = judge(residuals(program), setup.table)
    if not report.ok:
        return f"{report}\nthe step does not keep activations as the placement says; verify=false trains on"
    print(f"{report.found} of {report.asked} placements found in the step")
    return None


def _small(setup: Setup) -> Config:
    """As few layers as the table has rows, short sequences, and nothing frozen: patterns would name other layers."""
    config, context = setup.config, setup.config.mesh.context
    sequence = min(-(-_SEQUENCE // context) * context, config.train.sequence_length)
    free = dataclasses.replace(config, train=dataclasses.replace(config.train, freeze=()))
    return shrink(free, setup.table, num_rows(setup.table, config), sequence)
