"""Plans as tables on a terminal of 100 columns. Free of jax."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.plan.advice import Change
from recipes.plan.cases import Published
from recipes.plan.record import Plan
from recipes.plan.search import Found

WIDTH = 100
_LEAST = 0.005  # GiB: parts below are summed


def gib(count: float) -> str:
    return f"{count / 2**30:,.2f}"


def show(plans: Sequence[Plan], published: Mapping[str, Published], console: Console) -> None:
    """Everything about the plans: verdicts, parts, traffic, what to set, what to know."""
    target = plans[0].target
    console.print(_head(plans))
    console.print(_verdicts(plans, published))
    for some in _blocks(plans):
        console.print(_parts("one device, GiB by part", some, [_grouped(plan.parts) for plan in some]))
        if any(plan.host_bytes for plan in some):
            console.print(_parts("its host, GiB by tag", some, [_grouped(plan.host_parts) for plan in some]))
    for plan in plans:
        if plan.traffic:
            console.print(_traffic(plan))
    for line in dict.fromkeys(word for plan in plans for word in plan.warnings):
        console.print(Text(f"! {line}"))
    if target.platform == "cuda":
        console.print(Text(f"! set XLA_PYTHON_CLIENT_MEM_FRACTION={target.usable_fraction:g}"))
    for line in dict.fromkeys(note for plan in plans for note in plan.notes):
        console.print(Text(f"- {line}", style="dim"))


def show_found(found: Found, console: Console) -> None:
    """The steps of a search and its result."""
    table = _table("tried", [found.what, "device GiB", "host GiB", "fits"], "search")
    for value, plan in sorted(found.tried.items()):
        table.add_row("", f"{value:,}", gib(plan.device_peak_bytes), gib(plan.host_bytes), _verdict(plan))
    console.print(table)
    best = "least" if found.what == "devices" else "largest"
    if found.value is None:
        console.print(f"no {found.what} tried fits")
    elif found.exact:
        console.print(f"{best} {found.what} that fits: {found.value:,}")
    else:
        console.print(f"{found.what} {found.value:,} fits; the next ones were not tried: {len(found.tried)} compiles")


def show_advice(changes: Sequence[Change], console: Console) -> None:
    """What would save most, by estimate."""
    console.print("nothing planned fits; what would save most, by estimate:")
    for change in changes:
        console.print(Text(f"  {change.override:<48} {gib(change.saved_bytes):>8} GiB of the {change.memory}"))


def _head(plans: Sequence[Plan]) -> Text:
    target = plans[0].target
    host = f"{gib(target.host_bytes)} GiB of host, {target.to_host_bytes_per_s / 1e9:g} GB/s to it"
    back = f"{target.to_device_bytes_per_s / 1e9:g} back, a device"
    usable = f"{gib(target.usable_bytes)} of {gib(target.hbm_bytes)} GiB usable"
    return Text(f"{target.devices} x {target.name}: {usable}; {host}, {back}")


def _verdicts(plans: Sequence[Plan], published: Mapping[str, Published]) -> Table:
    columns = ["batch", "seq", "device GiB", "host GiB", "fits", "compile s"]
    more = ["published: device", "host", "fits", "TFLOP/s"] if published else []
    table = _table("plan", [*columns, *more])
    for plan in plans:
        row = [
            "" if plan.batch_size is None else f"{plan.batch_size:,}",
            "" if plan.sequence_length is None else f"{plan.sequence_length:,}",
            gib(plan.device_peak_bytes),
            gib(plan.host_bytes),
            _verdict(plan),
            f"{plan.compile_s:.0f}",
        ]
        told = published.get(plan.name)
        if told is not None:
            known = [_number(told.device_gib), _number(told.host_gib), "yes" if told.fits else "no"]
            row += [*known, _number(told.tflops)]
        table.add_row(plan.name, *row)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _verdict(plan: Plan) -> str:
    if plan.fits:
        return "yes"
    return "no: " + " and ".join(
        word for word, fits in (("device", plan.fits_device), ("host", plan.fits_host)) if not fits
    )


def _grouped(parts: Mapping[str, int]) -> dict[str, int]:
    """Activations by tag, over all groups of layers that have it in one place; the rest as it is."""
    grouped: dict[str, int] = {}
    for part, size in parts.items():
        words = part.split("/")
        name = f"activation {words[1]}" if words[0] == "activations" else part
        grouped[name] = grouped.get(name, 0) + size
    return grouped


def _parts(title: str, plans: Sequence[Plan], parts: Sequence[Mapping[str, int]]) -> Table:
    table = _table(title, [plan.name for plan in plans])
    names = list(dict.fromkeys(name for each in parts for name in each if name != "unexplained"))
    names.sort(key=lambda name: -max(each.get(name, 0) for each in parts))
    shown = [name for name in names if max(each.get(name, 0) for each in parts) >= _LEAST * 2**30]
    for name in shown:
        table.add_row(name, *(gib(each[name]) if each.get(name) else "" for each in parts))
    rest = [name for name in names if name not in shown]
    if rest:
        table.add_row(f"{len(rest)} smaller parts", *(gib(sum(each.get(n, 0) for n in rest)) for each in parts))
    table.add_row("unexplained", *(gib(each.get("unexplained", 0)) for each in parts))
    table.add_row("total", *(gib(sum(each.values())) for each in parts), style="bold")
    return table


def _traffic(plan: Plan) -> Table:
    columns = ["GiB each way", "ms to host", "ms to device"]
    table = _table(f"over the link in a step: {plan.name}", columns)
    for tag, moved in sorted(plan.traffic.items(), key=lambda item: -item[1].to_host_bytes):
        times = (f"{1e3 * moved.to_host_s:,.1f}", f"{1e3 * moved.to_device_s:,.1f}")
        table.add_row(tag, gib(moved.to_host_bytes), *times)
    moved = plan.traffic.values()
    out, back = sum(t.to_host_s for t in moved), sum(t.to_device_s for t in moved)
    table.add_section()
    table.add_row("all", gib(sum(t.to_host_bytes for t in moved)), f"{1e3 * out:,.1f}", f"{1e3 * back:,.1f}")
    if plan.forward_s is not None and plan.backward_s is not None:
        label = "products of the layers, forward and backward, at the bf16 peak"
        table.add_row(label, "", f"{1e3 * plan.forward_s:,.1f}", f"{1e3 * plan.backward_s:,.1f}")
        table.add_row("of which the transfers take", "", f"{out / plan.forward_s:.0%}", f"{back / plan.backward_s:.0%}")
    return table


def _table(first: str, columns: Sequence[str], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _blocks(plans: Sequence[Plan], size: int = 5) -> list[Sequence[Plan]]:
    return [plans[i : i + size] for i in range(0, len(plans), size)]
