"""Plans as a picture: memory by part against what the target has, and where each tag of each layer lives.

Free of jax; needs matplotlib.
"""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.plan.record import Plan

# Group -> colour and the parts that it sums, by how they begin; the first that fits counts.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "parameters": ("#08519c", ("parameters",)),
    "masters": ("#3182bd", ("masters",)),
    "moments": ("#9ecae1", ("moments",)),
    "gradients": ("#31a354", ("gradients",)),
    "parameters at work": ("#a1d99b", ("gathered parameters", "copies of parameters", "collectives")),
    "activations kept": ("#e6550d", ("activations",)),
    "recomputed in a layer": ("#fdae6b", ("recomputed",)),
    "dispatch and experts": ("#756bb1", ("dispatch",)),
    "on the way to and from host": ("#bcbddc", ("on the way",)),
    "unexplained": ("#de2d26", ("unexplained",)),
    "other": ("#bdbdbd", ("",)),
}
HOST_COLOUR = "#fd8d3c"
PLACES = {"device": "#e6550d", "host": "#fdbe85", "remat": "#e0e0e0", "-": "#ffffff", "": "#ffffff"}
_WORDS = {
    "device": "kept on the device",
    "host": "on the host",
    "remat": "recomputed",
    "-": "no effect, or no such tag",
}
_MAPS = 5


def write_png(plans: Sequence[Plan], path: Path) -> None:
    """The picture as a file."""
    path.write_bytes(_rendered(plans, "png"))


def write_html(plans: Sequence[Plan], path: Path) -> None:
    """One page with the picture and the tables, without anything from outside."""
    from rich.console import Console

    from recipes.plan.report import WIDTH, show

    console = Console(width=WIDTH, record=True, file=io.StringIO(), highlight=False)
    show(plans, {}, console)
    tables = html.escape(console.export_text())
    picture = base64.b64encode(_rendered(plans, "svg")).decode()
    title = html.escape(f"zoo-plan: {plans[0].target.devices} x {plans[0].target.name}")
    style = "body{font:15px sans-serif;margin:2em;max-width:80em}img{width:100%}pre{font-size:13px;overflow-x:auto}"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style><h1>{title}</h1>"
        f'<img alt="memory by part" src="data:image/svg+xml;base64,{picture}"><pre>{tables}</pre>\n'
    )


def grouped(parts: Mapping[str, int]) -> dict[str, int]:
    """Bytes by group, in the order of the groups."""
    sums = dict.fromkeys(GROUPS, 0)
    for part, size in parts.items():
        group = next(name for name, (_, begins) in GROUPS.items() if part.startswith(begins))
        sums[group] += size
    return sums


def _rendered(plans: Sequence[Plan], kind: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    maps = _distinct_maps(plans)
    tags = max((len(plan.places) for plan in maps), default=0)
    height = 5.2 + (1.4 + 0.19 * tags if maps else 0)
    figure = Figure(figsize=(max(9.0, 3.6 + 1.9 * len(plans)), height), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [5.2, 1.4 + 0.19 * tags] if maps else [1]
    grid = figure.add_gridspec(len(ratios), 1, height_ratios=ratios)
    _bars(figure.add_subplot(grid[0]), plans)
    if maps:
        inner = grid[1].subgridspec(1, len(maps))
        for column, plan in enumerate(maps):
            _map(figure.add_subplot(inner[column]), plan, first=column == 0)
        _map_legend(figure)
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=150)
    return out.getvalue()


def _bars(axes: Any, plans: Sequence[Plan]) -> None:
    target, gib = plans[0].target, 2**30
    top = max(target.usable_bytes, *(max(plan.device_peak_bytes, plan.host_bytes) for plan in plans)) / gib * 1.12
    for x, plan in enumerate(plans):
        base = 0.0
        for group, size in grouped(plan.parts).items():
            if size > 0:
                _segment(axes, x - 0.21, base, size / gib, GROUPS[group][0], f"{size / gib:.0f}", top)
                base += size / gib
        _total(axes, x - 0.21, base, top, plan.fits_device)
        base = 0.0
        for tag, _ in sorted(plan.traffic.items(), key=lambda item: -item[1].to_host_bytes):
            size = sum(v for part, v in plan.host_parts.items() if part.split("/")[1:2] == [tag]) / gib
            _segment(axes, x + 0.21, base, size, HOST_COLOUR, tag, top)
            base += size
        if base:
            _total(axes, x + 0.21, base, top, plan.fits_host)
    axes.axhline(target.usable_bytes / gib, color="#222222", linestyle="--", linewidth=1)
    label = f"usable HBM: {target.usable_bytes / gib:.0f} GiB"
    axes.text(-0.54, target.usable_bytes / gib, label, ha="left", va="bottom", fontsize=8)
    if target.host_bytes / gib < top:
        axes.axhline(target.host_bytes / gib, color=HOST_COLOUR, linestyle=":", linewidth=1)
        label = f"host memory: {target.host_bytes / gib:.0f} GiB"
        axes.text(-0.54, target.host_bytes / gib, label, ha="left", va="bottom", fontsize=8, color="#b35806")
    axes.set_xticks(range(len(plans)), [_broken(plan.name) for plan in plans], fontsize=9)
    axes.set_xlim(-0.55, len(plans) - 0.45)
    axes.set_ylim(0, top)
    axes.set_ylabel("GiB a device: left HBM, right its host")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{target.devices} x {target.name}", loc="left", fontsize=11)
    _legend(axes, plans)


def _segment(axes: Any, x: float, base: float, size: float, colour: str, word: str, top: float) -> None:
    axes.bar(x, size, 0.38, bottom=base, color=colour, edgecolor="white", linewidth=0.6)
    if size > 0.035 * top:
        dark = sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) < 380
        axes.text(x, base + size / 2, word, ha="center", va="center", fontsize=7, color="white" if dark else "black")


def _total(axes: Any, x: float, height: float, top: float, fits: bool) -> None:
    word = f"{height:.1f}" + ("" if fits else "\ndoes not fit")
    colour = "black" if fits else "#a50f15"
    axes.text(x, height + 0.01 * top, word, ha="center", va="bottom", fontsize=8, fontweight="bold", color=colour)


def _legend(axes: Any, plans: Sequence[Plan]) -> None:
    from matplotlib.patches import Patch

    sums = [grouped(plan.parts) for plan in plans]
    names = [name for name in GROUPS if any(each[name] > 0.004 * sum(each.values()) for each in sums)]
    patches = [Patch(color=GROUPS[name][0], label=name) for name in reversed(names)]
    if any(plan.host_bytes for plan in plans):
        patches.append(Patch(color=HOST_COLOUR, label="host, by tag"))
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=8)


def _distinct_maps(plans: Sequence[Plan]) -> list[Plan]:
    """A plan for each placement."""
    found: dict[str, Plan] = {}
    for plan in plans:
        if plan.places:
            found.setdefault(repr(plan.places), plan)
    return list(found.values())[:_MAPS]


def _map(axes: Any, plan: Plan, first: bool) -> None:
    from matplotlib.colors import ListedColormap

    kinds = list(PLACES)
    tags = list(plan.places)
    cells = [[kinds.index(place) for place in plan.places[tag]] for tag in tags]
    colours = ListedColormap(list(PLACES.values()))
    axes.imshow(cells, cmap=colours, vmin=-0.5, vmax=len(kinds) - 0.5, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(tags)), tags if first else [""] * len(tags), fontsize=7)
    axes.set_yticks([y - 0.5 for y in range(1, len(tags))], minor=True)
    axes.grid(which="minor", axis="y", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_title(_broken(plan.name), fontsize=8)


def _map_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=PLACES[place], edgecolor="#999999", label=word) for place, word in _WORDS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)


def _broken(name: str) -> str:
    """A name on two lines where it is long."""
    if len(name) <= 18:
        return name
    half = min((i for i, letter in enumerate(name) if letter == " "), key=lambda i: abs(i - len(name) / 2), default=0)
    return f"{name[:half]}\n{name[half + 1 :]}" if half else name
