"""What the checkpoint policies within a program ask for, as far as they are those that jax itself makes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn  # pyright: ignore[reportPrivateImportUsage]

from recipes.verify.flat import bodies

# What `jax.checkpoint_policies` close over -> the place that it means.
_MEANINGS = {"names_which_can_be_saved": "device", "names_which_can_be_offloaded": "host"}


def policies_of(eqn: JaxprEqn) -> Iterator[dict[str, str]]:
    """Tag -> place of every policy in an equation and what it holds."""
    policy = eqn.params.get("policy")
    if callable(policy):
        yield _read(policy)
    for body in bodies(eqn):
        yield from policies_within(body)


def policies_within(jaxpr: Jaxpr) -> Iterator[dict[str, str]]:
    """Tag -> place of every policy in a jaxpr."""
    for eqn in jaxpr.eqns:
        yield from policies_of(eqn)


def merged(policies: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The tags about which the policies that name them agree."""
    found: dict[str, set[str]] = {}
    for policy in policies:
        for tag, place in policy.items():
            found.setdefault(tag, set()).add(place)
    return {tag: places.pop() for tag, places in found.items() if len(places) == 1}


def _read(policy: Any) -> dict[str, str]:
    names = getattr(getattr(policy, "__code__", None), "co_freevars", ())
    closed = dict(zip(names, (cell.cell_contents for cell in policy.__closure__ or ()), strict=True)) if names else {}
    return {tag: place for word, place in _MEANINGS.items() for tag in closed.get(word, ()) if isinstance(tag, str)}
