"""Plans as tables on a terminal of 100 columns. Free of jax."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.plan.advice import Change
from recipes.plan.cases import Published
from recipes.plan.record import Plan
from recipes.plan.search import Found

WIDTH = 100
_LEAST = 0.0005  # of the total: parts below are summed
_COLUMNS = 6


def gib(count: float) -> str:
    """`1.50`, in GiB; what is below a hundredth with the digits that say something."""
    number = count / 2**30
    return f"{number:,.2f}" if abs(number) >= 0.1 or not count else f"{number:.2g}"


def show(plans: Sequence[Plan], published: Mapping[str, Published], console: Console) -> None:
    """Everything about the plans: verdicts, parts, traffic, what to set, what to know."""
    target = plans[0].target
    console.print(_head(plans))
    console.print(_verdicts(plans, published))
    for first in range(0, len(plans), _COLUMNS):
        some = plans[first : first + _COLUMNS]
        console.print(_parts("one device, GiB by part", first, some, [_grouped(plan.parts) for plan in some]))
        if any(plan.host_bytes for plan in some):
            console.print(_parts("its host, GiB by part", first, some, [_grouped(plan.host_parts) for plan in some]))
    for same in _same_traffic(plans):
        console.print(_traffic(plans[same[0]], ", ".join(str(i + 1) for i in same) if len(plans) > 1 else ""))
    for line in _differences(plans, published):
        console.print(Text(line))
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
    best = "fewest" if found.what == "devices" else "largest"
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
    sizes = "".join(
        f"; {name} {values[0]:,}" for name, values in _sizes(plans).items() if len(set(values)) == 1 and values[0]
    )
    return Text(f"{target.devices} x {target.name}: {usable}; {host}, {back}{sizes}")


def _sizes(plans: Sequence[Plan]) -> dict[str, list[int | None]]:
    return {"batch": [plan.batch_size for plan in plans], "sequence": [plan.sequence_length for plan in plans]}


def _verdicts(plans: Sequence[Plan], published: Mapping[str, Published]) -> Table:
    """One row a plan; published figures stand in parentheses behind the planned ones. Equal sizes are in the head."""
    sizes = {name: values for name, values in _sizes(plans).items() if len(set(values)) > 1}
    table = _table("plan", [*sizes, "device GiB", "host GiB", "fits", "compile s"])
    for number, plan in enumerate(plans):
        told = published.get(plan.name)
        size = ["" if values[number] is None else f"{values[number]:,}" for values in sizes.values()]
        device, host, fits = gib(plan.device_peak_bytes), gib(plan.host_bytes), _verdict(plan)
        if told is not None:
            device += "" if told.device_gib is None else f" ({told.device_gib:,.1f})"
            host += "" if told.host_gib is None else f" ({told.host_gib:,.1f})"
            fits += "" if told.fits is None else f" ({'yes' if told.fits else 'no'})"
        name = plan.name if len(plans) == 1 else f"{number + 1} {plan.name}"
        table.add_row(name, *size, device, host, fits, f"{plan.compile_s:.0f}")
    if any(published[plan.name].fits is not None for plan in plans if plan.name in published):
        table.caption, table.caption_justify = "in parentheses: published", "left"
    return table


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


def _parts(title: str, first: int, plans: Sequence[Plan], parts: Sequence[Mapping[str, int]]) -> Table:
    names = [plan.name for plan in plans] if len(plans) == 1 else [str(first + i + 1) for i in range(len(plans))]
    table = _table(title, names)
    names = list(dict.fromkeys(name for each in parts for name in each if name != "unexplained"))
    names.sort(key=lambda name: -max(each.get(name, 0) for each in parts))
    least = _LEAST * max(sum(each.values()) for each in parts)
    shown = [name for name in names if max(each.get(name, 0) for each in parts) >= least]
    for name in shown:
        table.add_row(name, *(gib(each[name]) if each.get(name) else "" for each in parts))
    rest = [name for name in names if name not in shown]
    if rest:
        label = "another part" if len(rest) == 1 else f"{len(rest)} smaller parts"
        table.add_row(label, *(gib(sum(each.get(n, 0) for n in rest)) for each in parts))
    table.add_row("unexplained", *(gib(each.get("unexplained", 0)) for each in parts))
    table.add_row("total", *(gib(sum(each.values())) for each in parts), style="bold")
    return table


def _differences(plans: Sequence[Plan], published: Mapping[str, Published]) -> Iterator[str]:
    """What a row of a published table takes more than another one, part by part."""
    by_name = {plan.name: plan for plan in plans}
    for plan in plans:
        told = published.get(plan.name)
        other = by_name.get(told.against or "") if told else None
        if told is None or other is None:
            continue
        names = list({**plan.parts, **other.parts})
        changes = {name: plan.parts.get(name, 0) - other.parts.get(name, 0) for name in names}
        large = sorted((n for n in names if abs(changes[n]) >= 0.05 * 2**30), key=lambda n: -abs(changes[n]))
        parts = ", ".join(f"{name} {changes[name] / 2**30:+.2f}" for name in large) or "no part by more than 0.05"
        total = (plan.device_peak_bytes - other.device_peak_bytes) / 2**30
        base = published[other.name].device_gib
        known = "" if told.device_gib is None or base is None else f" (published {told.device_gib - base:+.1f})"
        yield f"{plan.name} over {other.name}: {total:+.2f} GiB of the device{known}: {parts}"


def _same_traffic(plans: Sequence[Plan]) -> list[list[int]]:
    """Numbers of the plans that move something, those that move the same together."""
    groups: dict[str, list[int]] = {}
    for number, plan in enumerate(plans):
        if plan.traffic:
            groups.setdefault(repr((plan.traffic, plan.forward_s, plan.backward_s)), []).append(number)
    return list(groups.values())


def _traffic(plan: Plan, numbers: str) -> Table:
    columns = ["GiB each way", "ms to host", "ms back"]
    table = _table("over the link in a step" + (f": plan {numbers}" if numbers else ""), columns)
    for tag, moved in sorted(plan.traffic.items(), key=lambda item: -item[1].to_host_bytes):
        times = (f"{1e3 * moved.to_host_s:,.1f}", f"{1e3 * moved.to_device_s:,.1f}")
        table.add_row(tag, gib(moved.to_host_bytes), *times)
    moved = plan.traffic.values()
    out, back = sum(t.to_host_s for t in moved), sum(t.to_device_s for t in moved)
    table.add_section()
    table.add_row("all", gib(sum(t.to_host_bytes for t in moved)), f"{1e3 * out:,.1f}", f"{1e3 * back:,.1f}")
    if plan.forward_s is not None and plan.backward_s is not None:
        label = "layers' products at the bf16 peak: forward, backward"
        table.add_row(label, "", f"{1e3 * plan.forward_s:,.1f}", f"{1e3 * plan.backward_s:,.1f}")
        table.add_row("of which the transfers take", "", f"{out / plan.forward_s:.0%}", f"{back / plan.backward_s:.0%}")
    return table


def _table(first: str, columns: Sequence[str], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table
