"""Known-bad compilers are refused for host placement on a GPU, and nothing of the user's flags is touched."""

import pytest

from recipes.flags import compiler_options, compiler_version, parse_version, user_flags
from recipes.verify import check_versions
from recipes.verify.versions import FLAGS, RISKS

BAD, GOOD = ((0, 10, 2), (0, 11, 0)), ((0, 11, 1), (0, 12, 0, 1), (0, 13))


@pytest.mark.parametrize("version", BAD, ids=str)
def test_a_version_that_gives_wrong_gradients(version: tuple[int, ...]):
    found = check_versions("cuda", hosted=True, version=version)
    assert not found.ok
    assert "openxla/xla/pull/46231" in found.problems[0]
    assert "accept=wrong_gradients" in found.problems[0]
    assert check_versions("gpu", hosted=True, version=version) == found
    accepted = check_versions("cuda", hosted=True, accept="wrong_gradients", version=version)
    assert accepted.ok
    assert accepted.notes[0].startswith("accepted: ")


@pytest.mark.parametrize("version", BAD, ids=str)
def test_what_such_a_version_does_not_break(version: tuple[int, ...]):
    assert check_versions("cuda", hosted=False, version=version).ok
    assert check_versions("cpu", hosted=True, version=version).ok
    assert check_versions("tpu", hosted=True, version=version).ok


@pytest.mark.parametrize("version", GOOD, ids=str)
def test_versions_that_are_mended(version: tuple[int, ...]):
    assert check_versions("cuda", hosted=True, version=version).ok


def test_flags_of_the_user_that_touch_the_host_are_named():
    for flag in FLAGS:
        environment = {"XLA_FLAGS": f"--xla_dump_to=x --{flag.name}=true"}
        found = check_versions("cuda", hosted=True, version=(0, 12), environment=environment)
        assert found.ok
        assert flag.references[0] in found.notes[0]
        assert not check_versions("cuda", hosted=False, version=(0, 12), environment=environment).notes
    assert all(each.references for each in (*RISKS, *FLAGS))


def test_the_version_is_that_of_the_compiler():
    assert parse_version("0.12.0.1") == (0, 12, 0, 1)
    assert parse_version("0.12.0.dev3+x") == (0, 12, 0)
    assert compiler_version("cuda") >= (0, 11, 1)
    assert compiler_version("cpu") >= (0, 11, 1)


def test_the_users_flags_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert compiler_options("cuda")["xla_gpu_enable_pipelined_host_offloading"] is False
    flags = "--xla_gpu_enable_pipelined_host_offloading=true --xla_disable_hlo_passes=fusion"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert compiler_options("cuda") == {"xla_disable_hlo_passes": "fusion,rematerialization,simplify-while-loops"}
    assert user_flags({"XLA_FLAGS": "--xla_a --xla_b=2 word"}) == {"xla_a": "true", "xla_b": "2"}


def test_a_flag_is_given_only_to_a_compiler_that_knows_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr("recipes.flags.compiler_version", lambda platform: (0, 8, 1))
    assert "xla_gpu_enable_pipelined_host_offloading" not in compiler_options("cuda")
