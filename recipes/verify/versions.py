"""The fourth check: compilers and flags that are known to break what is placed on the host. Free of jax."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.flags import compiler_version, user_flags


@dataclass(frozen=True)
class Risk:
    """Compilers from version `since` to before `until` that break what is on the host, on one platform.

    - `name`: the word that accepts the risk; `problem`: what happens; `references`: where that is said and mended.
    """

    name: str
    platform: str
    since: tuple[int, ...]
    until: tuple[int, ...]
    problem: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class RiskyFlag:
    """A flag of XLA that, with one of these values, touches what is on the host; it is the user's own to set."""

    name: str
    values: tuple[str, ...]
    problem: str
    references: tuple[str, ...]


_XLA = "https://github.com/openxla/xla/pull/"

# 0.10.2 and 0.11.0 were compiled with and read from byte 0 on, 0.11.1 and 0.12.0.1 read from the end
# (tests/data/hlo has 0.11.0 and 0.12.0.1); older ones nobody has looked at here.
RISKS = (
    Risk(
        "wrong_gradients",
        "cuda",
        (0, 10, 2),
        (0, 11, 1),
        "the backward pass reads what layers saved on the host in the wrong order: wrong gradients, without a word",
        (f"{_XLA}46231", f"{_XLA}46308"),
    ),
)
FLAGS = (
    RiskyFlag(
        "xla_gpu_enable_pipelined_host_offloading",
        ("true", "1"),
        "moves copies to and from the host into other steps; while it was the default a model did not converge",
        (f"{_XLA}37979", f"{_XLA}45393", f"{_XLA}39302"),
    ),
    RiskyFlag(
        "xla_gpu_enable_host_memory_offloading",
        ("true", "1"),
        "lets the compiler choose arrays of its own for the host, beside those that the placement names",
        (f"{_XLA}11895",),
    ),
)
ACCEPTABLE = tuple(risk.name for risk in RISKS)


@dataclass(frozen=True)
class Versions:
    """`problems` refuse the run, `notes` do not; both name their public references."""

    platform: str
    compiler: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [*(f"! {problem}" for problem in self.problems), *(f"note: {note}" for note in self.notes)]
        return "\n".join([*lines, f"compiler {self.compiler or 'unknown'} for {self.platform}"])

    def to_json(self) -> dict[str, Any]:
        """Plain lists, maps and numbers."""
        return {"ok": self.ok} | dataclasses.asdict(self)


def check_versions(
    platform: str,
    hosted: bool,
    accept: str | None = None,
    *,
    version: tuple[int, ...] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Versions:
    """Looks up the compiler for `platform` (`cpu`, `cuda` or `tpu`) and the user's `XLA_FLAGS` among the known risks.

    `hosted`: whether anything is placed on the host; else nothing is at risk. `accept`: the name of a risk to take.
    """
    platform = "cuda" if platform == "gpu" else platform
    version = compiler_version(platform) if version is None else version
    flags = user_flags(os.environ if environment is None else environment)
    problems, notes = [], []
    for risk in RISKS if hosted else ():
        if risk.platform == platform and risk.since <= version < risk.until:
            said = f"compiler {_word(version)}: {risk.problem} ({', '.join(risk.references)})"
            if risk.name == accept:
                notes.append(f"accepted: {said}")
            else:
                until = _word(risk.until)
                problems.append(f"{said}; jaxlib {until} or later has it mended, accept={risk.name} goes on regardless")
    for flag in FLAGS if hosted and platform == "cuda" else ():
        if flags.get(flag.name, "").lower() in flag.values:
            notes.append(f"XLA_FLAGS has --{flag.name}: {flag.problem} ({', '.join(flag.references)})")
    return Versions(platform, _word(version), tuple(problems), tuple(notes))


def _word(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
