"""A reward is tried with no model: gold 1, empty 0, hostile 0."""

from pathlib import Path

import pytest

from rollcli import registry
from rollcli.rewards.check import check

PLUGINS = Path(__file__).with_name("plugins.py")


def test_math_passes_all_cases():
    cases = check("math")
    assert [(case.expected, case.got) for case in cases] == [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert all(case.passed for case in cases)


def test_gold_of_a_given_sample():
    assert check("math", {"answer": r"\frac{\pi}{2}"})[0].passed


def test_a_reward_that_fails_says_why():
    gold, empty, *_ = check(f"{PLUGINS}:echo", {"answer": "2"})
    assert (gold.got, gold.passed) == (2.0, False)
    assert "ValueError" in empty.got and not empty.passed


@pytest.mark.parametrize("name", sorted(set(registry.builtin("rewards")) - {"math"}))
def test_every_reward_that_needs_nothing_keeps_its_contract(name):
    assert [case for case in check(name) if not case.passed] == []
