"""`zoo-plan`: says what a run would need on hardware that is not there, and whether it fits. Does not import jax."""

import dataclasses
import json
import sys
from pathlib import Path

from omegaconf import DictConfig

from recipes.cli.launch import BAD_CONFIGURATION, launch
from recipes.cli.runtime import require_extra, require_writable
from recipes.plan.cases import Case, Published, compared, published_cases
from recipes.plan.config import PlanConfig, PlanRunConfig
from recipes.plan.record import Plan
from recipes.schema import read_plan

NOTHING_FITS = 1


def main() -> None:
    """Entry point of `zoo-plan`."""
    launch("zoo-plan", plan, "plan")


def plan(tree: DictConfig) -> int:
    """Plans what the configuration asks for; 0 if something fits, 1 if nothing does, 2 for what cannot be planned."""
    config, target, told, run, names = read_plan(tree)
    require_extra("zoo-plan", "train", "rich", *(("matplotlib",) if run.png or run.html else ()))
    for name in ("json", "html", "png"):
        require_writable(f"run.{name}", getattr(run, name))
    case = Case(_chosen(), config, target, told.options)

    from recipes.plan.planned import PlanError

    try:
        return _plan(case, told, run, names)
    except PlanError as error:
        print(f"zoo-plan: {error}", file=sys.stderr)
        return BAD_CONFIGURATION


def _plan(case: Case, told: PlanConfig, run: PlanRunConfig, names: tuple[str, ...]) -> int:
    from rich.console import Console

    from recipes.plan.advice import advice
    from recipes.plan.planned import Limits, planned
    from recipes.plan.report import WIDTH, show, show_advice, show_found
    from recipes.plan.search import search

    limits = Limits(told.timeout_s, int(told.memory_gib * 2**30))
    folder = None if run.plans is None else Path(run.plans).expanduser()
    console = Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH, highlight=False)
    cases = compared(case, names) if names else [case]
    if told.published is not None:
        source, cases = published_cases(case, told.published)
        console.print(f"beside {source}")
    plans: list[Plan] = []
    for each in cases:
        what = told.maximise or told.minimise
        if what is None:
            plans.append(planned(each, limits, folder))
            continue
        found = search(what, each, lambda case: planned(case, limits, folder))
        show_found(found, console)
        best = found.plan if found.plan is not None else min(found.tried.values(), key=lambda p: p.device_peak_bytes)
        plans.append(dataclasses.replace(best, name=each.name))
    published: dict[str, Published] = {each.name: each.published for each in cases if each.published is not None}
    show(plans, published, console)
    _write(plans, run)
    if any(found.fits for found in plans):
        return 0
    least = min(range(len(plans)), key=lambda i: plans[i].device_peak_bytes)
    show_advice(advice(plans[least], cases[least].config), console)
    return NOTHING_FITS


def _write(plans: list[Plan], run: PlanRunConfig) -> None:
    if run.json is not None:
        Path(run.json).write_text(json.dumps({"plans": [each.to_json() for each in plans]}, indent=1) + "\n")
    if run.png is not None or run.html is not None:
        from recipes.plan.picture import write_html, write_png

        if run.png is not None:
            write_png(plans, Path(run.png))
        if run.html is not None:
            write_html(plans, Path(run.html))


def _chosen() -> str:
    """The name of the placement's file."""
    from hydra.core.hydra_config import HydraConfig

    return str(HydraConfig.get().runtime.choices["placement"])


if __name__ == "__main__":
    main()
