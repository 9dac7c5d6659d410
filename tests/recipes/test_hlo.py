"""The compiled check: right programs pass, and every way in which a compiler breaks a placement is seen."""

import os
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from recipes.plan.targets import Target
from recipes.verify import Subject, check_apart, check_compiled, check_hlo, trace
from recipes.verify.hlo import Compiled
from recipes.verify.hlo_text import parse
from recipes.verify.proof import compiled_here
from tests.recipes import own_step
from tests.recipes.hlo_texts import FOLDER

TARGET = Target.named("h200")
RIGHT = "cuda_0.12.0.1_right"
LAYER_BYTES = own_step.BATCH * own_step.HIDDEN * 4
REVERSED = "gradients will be wrong: host reads in order from byte 0 by 131072, not from 393216 by -131072 (1 stacks)"
WHOLE = "the state on the host is moved to the device whole: 1048576 of 1048576 bytes in 2 copies"
# What a compiler made of a step -> what is wrong with it.
TEXTS = {
    RIGHT: (),
    "cuda_0.11.0_right": (REVERSED,),
    "cuda_0.12.0.1_whole_state": (WHOLE,),
    "cuda_0.12.0.1_host_compute": ("computed on the host: tanh (2 operations)",),
    "tpu_0.12.0.1_right": (),
    "tpu_0.12.0.1_whole_state": (WHOLE,),
}


def text(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def checked(hlo: str, **options: Any) -> Compiled:
    return check_hlo(hlo, trace(own_step.make_step("right"), *own_step.arguments()), **options)


def test_every_text_is_checked():
    assert {file.stem for file in Path(FOLDER).iterdir()} == TEXTS.keys()


@pytest.mark.parametrize(("name", "problems"), TEXTS.items(), ids=TEXTS)
def test_texts_of_compilers(name: str, problems: tuple[str, ...]):
    """Case 1 is 0.11.0: gradients that are wrong without a word; the same step and the same memory as of 0.12.0.1."""
    found = checked(text(name))
    assert found.problems == problems
    assert found.ok is (not problems)
    assert (found.asked, found.found, found.host_bytes) == (4, 4, 4 * LAYER_BYTES)


# What a compiler could do to a copy -> what is said of the array.
OUT, BACK = "calls=%wrapped_dynamic-update-slice", "calls=%wrapped_dynamic-slice"
READ, COMPUTED = r"ROOT %\S+ = \S+ dynamic-slice\((.*?)\)", r"ROOT %x = f32[1,128,256]{2,1,0} negate(\1)"
BROKEN = {
    "kept": (r"S\(5\)", "S(0)", "stays on the device or is computed again"),
    "out in step": (rf"fusion-start(\(.*{OUT})", r"fusion\1", "the copy out halts the device"),
    "back in step": (rf"fusion-start(\(.*{BACK})", r"fusion\1", "the copy back halts the device"),
    "not back": (READ, COMPUTED, "is copied out and not back as it was"),
}


@pytest.mark.parametrize(("pattern", "instead", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_copy_that_is_missing_or_halts_the_device(pattern: str, instead: str, problem: str):
    hlo, count = re.subn(pattern, instead, text(RIGHT))
    assert count
    found = checked(hlo)
    assert [each.problem for each in found.arrays] == [problem]
    assert (found.ok, found.found) == (False, 0)
    assert str(found).splitlines()[1 + len(found.problems)].endswith(f"! {problem}")


def test_more_on_the_host_than_was_asked():
    assert checked(text(RIGHT), host_temp_bytes=4 * LAYER_BYTES).ok
    found = checked(text(RIGHT), host_temp_bytes=5 * LAYER_BYTES)
    assert found.problems == (f"{LAYER_BYTES} bytes on the host beside the activations that were asked to be there",)


def test_a_stack_that_is_written_from_its_end_is_read_from_its_beginning():
    """`lax.scan(reverse=True)` in the forward pass: the order of the reads is that of the writes turned round."""
    forwards, backwards = '"byte_offset":"0","byte_stride":"131072"', '"byte_offset":"393216","byte_stride":"-131072"'
    turned = text(RIGHT).replace(forwards, backwards)
    (problem,) = checked(turned).problems
    assert "from byte 393216 by -131072, not from 0 by 131072" in problem


def test_what_is_no_program():
    with pytest.raises(ValueError, match="no entry computation"):
        parse("HloModule nothing\n")


# Compiled with the compiler at hand. What is wrong before it compiles stays wrong.
@pytest.mark.parametrize(("variant", "found"), [("right", 4), ("misspelt destination", 0)])
def test_a_step_that_is_not_ours_is_compiled(variant: str, found: int):
    traced, compiled = check_compiled(own_step.make_step(variant), *own_step.arguments(), target=TARGET)
    assert (compiled.asked, compiled.found, compiled.host_bytes) == (4, found, found * LAYER_BYTES)
    assert traced.ok is compiled.ok is (variant == "right")


def subject(variant: str) -> Subject:
    """In a process of its own."""
    if variant == "crash":
        os.abort()
    return Subject(own_step.make_step(variant), own_step.arguments(), {"hidden": "host"})


def test_in_a_process_of_its_own():
    traced, compiled = check_apart(subject, "right", target=TARGET, timeout_s=120)
    assert traced is not None
    assert (traced.ok, compiled.ok, compiled.found) == (True, True, 4)


def test_a_compiler_that_crashes_or_hangs_is_a_problem_of_the_report():
    traced, compiled = check_apart(subject, "crash", target=TARGET, timeout_s=120)
    assert (traced, compiled.ok) == (None, False)
    assert compiled.problems[0] == "the compiler's process crashed with exit code -6"
    assert "took more than 0.1 s" in check_apart(subject, "right", target=TARGET, timeout_s=0.1)[1].problems[0]


def test_the_compiler_at_hand():
    """The CPU has no memory beside its own: what is placed on the host is not found there; the rest asks nothing."""
    args = own_step.arguments()
    for variant, found in (("right", 0), ("misspelt destination", 0)):
        step = jax.jit(own_step.make_step(variant))
        asked = {"hidden": "host" if variant == "right" else "device"}
        compiled = compiled_here(step, args, trace(step, *args, asked=asked))
        assert (compiled.ok, compiled.found) == (variant != "right", found)
