"""`roll rewards`."""

from __future__ import annotations

import json

import pytest


def test_ls(roll):
    assert ["math", "rollcli.rewards.math:math"] in [line.split() for line in roll("rewards", "ls").out.splitlines()]
    assert "math\n" in roll("rewards", "ls", "-q").out
    assert {"name": "math", "target": "rollcli.rewards.math:math"} in json.loads(roll("rewards", "ls", "--json").out)


def test_a_reward_that_keeps_its_contract(roll):
    result = roll("rewards", "check", "math", "--json")
    assert result.code == 0 and json.loads(result.out)["passed"] is True


@pytest.fixture
def generous(workplace):
    (workplace / "mine.py").write_text("def score(response: str) -> float:\n    return 1.0\n")
    return "./mine.py:score"


def test_a_reward_that_does_not(roll, generous):
    result = roll("rewards", "check", generous)
    assert result.code == 1
    lines = [line.split("  ") for line in result.out.splitlines()]
    assert lines[1][0] == "gold answer" and lines[1][-1] == "ok"
    assert lines[2][0] == "empty answer" and lines[2][-1] == "failed"
    assert result.err.startswith("\nhint: ")


def test_an_unknown_reward(roll):
    result = roll("rewards", "check", "mth")
    assert result.code == 1 and result.err.startswith("error: unknown reward `mth` (did you mean `math`?)")
