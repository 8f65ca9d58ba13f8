"""`roll rewards`."""

from __future__ import annotations

import json

import pytest

from rollcli import registry
from rollcli.errors import PluginError


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


def test_a_reward_that_raises_tells_its_error_once(roll, workplace):
    (workplace / "mine.py").write_text("def score(response: str) -> float:\n    raise ValueError('no such field')\n")
    result = roll("rewards", "check", "./mine.py:score")
    assert result.code == 1 and result.err == ""
    assert result.out.count("no such field") == 1
    assert [line.split()[-3:] for line in result.out.splitlines()[1:5]] == [["no", "score", "failed"]] * 4
    assert result.out.splitlines()[5] == "" and result.out.splitlines()[6].startswith("error: ")


def test_a_file_without_a_function(roll, workplace):
    result = roll("rewards", "check", "./good.py")
    assert result.code == 1
    assert result.err == "error: `./good.py` is a file, not a reward\n\nhint: name the function: `./good.py:score`\n"


def test_a_function_that_the_module_lacks(roll):
    assert roll("rewards", "check", "json:scroe").err.endswith("hint: a reward is named as `json:attribute`\n")
    with pytest.raises(PluginError) as raised:
        registry.resolve("environments", "json:Shop")
    assert raised.value.hint == "an environment is named as `json:attribute`"
