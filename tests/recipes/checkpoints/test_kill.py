"""A killed run goes on as if it had not been."""

from tests import helpers
from tests.bench.kill_resume import kill_and_resume


def test_kills_change_nothing(tmp_path):
    kills = 5 if helpers.LONG else 1
    assert kill_and_resume(tmp_path, kills=kills, seed=1).startswith(f"{kills} kills")
