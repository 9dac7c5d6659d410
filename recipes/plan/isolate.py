"""Work in a process of its own: a compiler that crashes, hangs or eats the memory is a report, not the end."""

import os
import resource
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple


class IsolatedError(RuntimeError):
    """The process crashed, was stopped, or raised; `log` is what it wrote to stderr."""

    def __init__(self, problem: str, log: str):
        super().__init__(problem)
        self.log = log


class Isolated(NamedTuple):
    """What a function returned, and what its process wrote to stderr: the compiler's warnings."""

    result: Any
    log: str


def isolated(fn: Callable, *args: Any, timeout_s: float, memory_bytes: int | None = None) -> Isolated:
    """`fn(*args)` in a new process; `fn`, `args` and the result are pickled.

    Raises IsolatedError if it takes more than `timeout_s`, needs more than `memory_bytes` of memory, crashes or raises.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(mode="r", errors="replace") as stderr:
        process = context.Process(target=_child, args=(sender, stderr.name, memory_bytes, fn, args))
        process.start()
        sender.close()
        try:
            answer = receiver.recv() if receiver.poll(timeout_s) else None
        except EOFError:
            process.join()
            answer = (f"crashed with exit code {process.exitcode}", None)
        process.kill()
        process.join()
        log = stderr.read()
    if answer is None:
        raise IsolatedError(f"took more than {timeout_s:g} s", log)
    problem, result = answer
    if problem is not None:
        raise IsolatedError(problem, log)
    return Isolated(result, log)


def _child(sender: Connection, log: str, memory_bytes: int | None, fn: Callable, args: tuple) -> None:
    with Path(log).open("w") as stderr:
        os.dup2(stderr.fileno(), 2)  # of libraries too
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        answer = (None, fn(*args))
    except MemoryError:
        answer = (f"needs more than {memory_bytes} bytes of memory", None)
    except Exception as error:
        answer = (f"{type(error).__name__}: {error}", None)
    sender.send(answer)
