"""Work in a process of its own: results come back, and every way to fail is a report."""

import os
import time

import pytest

from recipes.plan.isolate import IsolatedError, isolated


def square(x: int) -> int:
    return x * x


def test_a_result_and_what_was_written_to_stderr_come_back():
    assert isolated(square, 7, timeout_s=60).result == 49
    assert isolated(os.write, 2, b"a warning", timeout_s=60).log == "a warning"


@pytest.mark.parametrize(
    ("fn", "args", "problem"),
    [
        (os.abort, (), "crashed with exit code -6"),
        (time.sleep, (60,), "took more than 3 s"),
        (square, ("a",), "TypeError: can't multiply sequence"),
        (bytearray, (2**30,), "needs more than 268435456 bytes of memory"),
    ],
)
def test_a_failure_is_reported(fn, args, problem):
    with pytest.raises(IsolatedError, match=problem):
        isolated(fn, *args, timeout_s=3, memory_bytes=2**28)
