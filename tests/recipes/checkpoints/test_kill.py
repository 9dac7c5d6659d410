"""A killed run goes on as if it had not been."""

from tests.bench.kill_resume import kill_and_resume


def test_two_kills_change_nothing(tmp_path):
    assert kill_and_resume(tmp_path, kills=2, seed=1).startswith("2 kills")
