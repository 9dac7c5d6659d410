"""The second check: what the compiler made of a placement, read from the optimised program for CUDA or TPU."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipes.verify.arguments import Argument, StateArray, arguments_of, check_arguments
from recipes.verify.hlo_text import Module, parse
from recipes.verify.residuals import Kept
from recipes.verify.tracing import Asked, Trace, trace
from recipes.verify.transfers import Transfer, host_computations, host_state_bytes, transfers

if TYPE_CHECKING:
    from recipes.plan.targets import Target

_ALIGNMENT = 256  # what the compiler may add to each buffer, in bytes
_WHOLE = 0.5  # more of the state on the host than this, moved at once, is a move of the whole tree


@dataclass(frozen=True)
class HostArray:
    """An activation that the trace has on the host, and how the compiled program moves it.

    - `loop`, `turn`: which layers it belongs to, see `Kept`; `layers`: how many these are.
    - `step_bytes`: of each, over all devices; `device_bytes`: on one of them, 0 if it is not there.
    """

    tag: str
    loop: int | None
    turn: int
    layers: int
    step_bytes: int
    device_bytes: int
    problem: str | None


@dataclass(frozen=True)
class Compiled:
    """What was asked of the host, what the compiled program does, and all that is wrong with it.

    - `arrays`: the activations on the host; `asked`: the cells (layer and tag) that were to be there.
    - `state`: the arguments that are changed in place, and those on the host.
    - `host_temp_bytes`: what the compiler sets aside on the host, on one device; None if it was not asked.
    - `notes`: what is not wrong but costs.
    """

    arrays: tuple[HostArray, ...]
    asked: int
    problems: tuple[str, ...]
    host_temp_bytes: int | None = None
    compile_s: float = 0.0
    notes: tuple[str, ...] = ()
    state: tuple[StateArray, ...] = ()

    @property
    def found(self) -> int:
        """How many of the asked cells are moved out and back as they should be."""
        cells: dict[tuple, tuple[int, bool]] = {}
        for each in self.arrays:
            key = (each.tag, each.loop, each.turn)
            cells[key] = (each.layers, each.problem is None and cells.get(key, (0, True))[1])
        return min(self.asked, sum(layers for layers, good in cells.values() if good))

    @property
    def host_bytes(self) -> int:
        """Bytes of the activations that were found on the host, on one device."""
        return sum(each.layers * each.device_bytes for each in self.arrays)

    @property
    def ok(self) -> bool:
        moved = self.found == self.asked and all(each.problem is None for each in self.arrays)
        return not self.problems and moved and all(each.ok for each in self.state)

    def __str__(self) -> str:
        from recipes.verify.report import show_compiled

        return show_compiled(self)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, maps and numbers."""
        return {"ok": self.ok, "found": self.found, "host_bytes": self.host_bytes} | dataclasses.asdict(self)


def check_compiled(
    fn: Callable, *args: Any, target: "Target", asked: Asked = None, devices: int = 1, gradient_bytes: int = 0
) -> tuple[Trace, Compiled]:
    """Traces `fn(*args)`, compiles it for a target that need not be there, and compares.

    `args` and `fn` are what `recipes.plan.compile.compile_for` takes, `asked` is what `trace` takes; arrays are split
    over `devices`, and `gradient_bytes` are what `check_hlo` takes. A compiler that crashes takes this process along;
    `check_apart` survives it.
    """
    from recipes.plan.compile import compile_lowered, lower_for

    traced = trace(fn, *args, asked=asked)
    lowered = lower_for(fn, *args, target=target)[1]
    memory = compile_lowered(lowered, target)
    found = check_hlo(
        memory.hlo,
        traced,
        devices=devices,
        host_temp_bytes=memory.host_temp_bytes,
        gradient_bytes=gradient_bytes,
        arguments=arguments_of(lowered, args),
    )
    return traced, dataclasses.replace(found, compile_s=memory.compile_s)


def check_apart(
    make: Callable[..., "Subject"], *make_args: Any, target: "Target", timeout_s: float, memory_bytes: int | None = None
) -> tuple[Trace | None, Compiled]:
    """`check_compiled` of what `make(*make_args)` returns, in a process of its own, for which both are pickled.

    A compiler that crashes, hangs or needs too much memory is a problem of the report; there is no trace then.
    """
    from recipes.plan.isolate import IsolatedError, isolated

    try:
        return isolated(_made, make, make_args, target, timeout_s=timeout_s, memory_bytes=memory_bytes).result
    except IsolatedError as error:
        last = error.log.strip().splitlines()[-1:]
        return None, Compiled((), 0, (f"the compiler's process {error}", *last))


@dataclass(frozen=True)
class Subject:
    """What is checked: a function, its abstract arguments, what was asked of it, over how many devices it is split.

    `gradient_bytes`: see `check_hlo`.
    """

    fn: Callable
    args: tuple
    asked: Asked = None
    devices: int = 1
    gradient_bytes: int = 0


def _made(make: Callable[..., Subject], args: tuple, target: "Target") -> tuple[Trace, Compiled]:
    subject = make(*args)
    more = {"asked": subject.asked, "devices": subject.devices, "gradient_bytes": subject.gradient_bytes}
    return check_compiled(subject.fn, *subject.args, target=target, **more)


def check_hlo(
    hlo: str,
    traced: Trace,
    *,
    devices: int = 1,
    host_temp_bytes: int | None = None,
    gradient_bytes: int = 0,
    arguments: Sequence[Argument] = (),
) -> Compiled:
    """Compares an optimised program with the trace of the same function.

    Every array that the trace has on the host needs a host buffer of its size (a whole part of it, on several devices),
    an asynchronous copy out and one back. The backward pass reads a stack from the end that was written last, where the
    compiler says from where it reads (CUDA does). Nothing is computed on the host, and its state is not moved at once.

    `arguments`: what `recipes.verify.arguments.arguments_of` gives, to check each by itself. `gradient_bytes`: of the
    gradients that may be on the host of one device between the passes and the update.
    """
    module = parse(hlo)
    moves = list(transfers(module))
    state, state_kinds = check_arguments(hlo, arguments, moves) if arguments else ((), set())
    wanted = [each for each in traced.kept if each.place == "host" and not each.is_argument]
    free = [move for move in moves if _is_free(move, wanted, state_kinds)]
    outs = _assign(wanted, [move for move in free if move.out and not move.blank], devices)
    backs = _assign(wanted, [move for move in free if not move.out], devices)
    arrays = tuple(map(_judged, wanted, outs, backs))
    asked = sum(cell.asked == "host" for cell in traced.cells)
    found = Compiled(arrays, asked, (), host_temp_bytes, state=state)
    # Of stacks each array is checked by itself; what stands outside of them, such as an embedding, is moved whole.
    whole = [] if any(each.layers for each in arguments) else _state(module, moves)
    problems = [*_directions(moves, state_kinds), *_computed(module), *whole, *_bytes(found, gradient_bytes)]
    return dataclasses.replace(found, problems=tuple(problems), notes=tuple(_notes(moves)))


def _is_free(move: Transfer, wanted: Sequence[Kept], state: set[tuple]) -> bool:
    """Whether a copy may be one of an activation, rather than of an argument that looks like no activation."""
    array = move.host_array
    return (array.dtype, array.dims) not in state or array.dims in {(each.steps, *each.shape) for each in wanted}


def _assign(wanted: Sequence[Kept], moves: Sequence[Transfer], devices: int) -> list[Transfer | None]:
    """A transfer of its own for each array, if there are as many that fit: asynchronous ones first."""
    order = sorted(range(len(moves)), key=lambda number: not moves[number].asynchronous)
    fits = [[number for number in order if _fits(each, moves[number], devices)] for each in wanted]
    owner: dict[int, int] = {}

    def claim(want: int, tried: set[int]) -> bool:
        for number in fits[want]:
            if number not in tried:
                tried.add(number)
                if number not in owner or claim(owner[number], tried):
                    owner[number] = want
                    return True
        return False

    for want in range(len(wanted)):
        claim(want, set())
    given = {want: moves[number] for number, want in owner.items()}
    return [given.get(want) for want in range(len(wanted))]


def _fits(want: Kept, move: Transfer, devices: int) -> bool:
    parts, rest = divmod(want.step_bytes, move.moved_bytes)
    return move.steps == want.steps and rest == 0 and devices % parts == 0 if parts else False


def _judged(want: Kept, out: Transfer | None, back: Transfer | None) -> HostArray:
    problem = None
    if out is None:
        problem = "stays on the device or is computed again"
    elif back is None:
        problem = "is copied out and not back as it was"
    elif not out.asynchronous or not back.asynchronous:
        problem = f"the copy {'back' if out.asynchronous else 'out'} halts the device"
    size = 0 if out is None else out.moved_bytes
    return HostArray(want.tag or want.operation, want.loop, want.turn, want.steps, want.step_bytes, size, problem)


def _directions(moves: Sequence[Transfer], state: set[tuple]) -> list[str]:
    """Backward reads that do not walk the other way than the writes of such a stack; of `state`, from the end."""
    written = {move.host_array: set[int]() for move in moves}
    for move in moves:
        if move.out and move.walk is not None:
            written[move.host_array].add(1 if move.walk[1] > 0 else -1)
    wrong: dict[str, int] = {}
    for move in moves:
        if move.out or not move.backward or move.walk is None or move.steps == 1:
            continue
        argument = (move.host_array.dtype, move.host_array.dims) in state
        way = -1 if argument or written[move.host_array] != {-1} else 1
        start = (move.steps - 1) * move.moved_bytes if way < 0 else 0
        if move.walk != (start, way * move.moved_bytes):
            said = f"from byte {move.walk[0]} by {move.walk[1]}, not from {start} by {way * move.moved_bytes}"
            wrong[said] = wrong.get(said, 0) + 1
    return [f"gradients will be wrong: host reads in order {said} ({count} stacks)" for said, count in wrong.items()]


def _computed(module: Module) -> list[str]:
    found = host_computations(module)
    return [f"computed on the host: {', '.join(sorted(set(found)))} ({len(found)} operations)"] if found else []


def _state(module: Module, moves: Sequence[Transfer]) -> list[str]:
    whole = [move.moved_bytes for move in moves if move.whole_state]
    total = host_state_bytes(module)
    if sum(whole) <= _WHOLE * total:
        return []
    return [f"the state on the host is moved to the device whole: {sum(whole)} of {total} bytes in {len(whole)} copies"]


def _bytes(found: Compiled, gradient_bytes: int) -> list[str]:
    """The compiler's own sum, for what no name explains."""
    extra = (found.host_temp_bytes or 0) - found.host_bytes - gradient_bytes
    if extra <= _ALIGNMENT * len(found.arrays):
        return []
    return [f"{extra} bytes on the host beside the activations that were asked to be there"]


def _notes(moves: Sequence[Transfer]) -> list[str]:
    blank = [move.moved_bytes for move in moves if move.blank and not move.asynchronous]
    if not blank:
        return []
    return [f"{len(blank)} stacks of one layer are filled on the host before they are written: {sum(blank)} bytes"]
