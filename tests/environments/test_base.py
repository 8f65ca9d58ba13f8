"""What an environment answers, and that every built-in one can be told apart and configured."""

import dataclasses
import inspect

import pytest

from rollcli import registry
from rollcli.environments import BUILTIN
from rollcli.environments.base import StepResult


def test_results_share_nothing() -> None:
    first, second = StepResult(), StepResult()
    first.messages.append({"role": "user", "content": "a"})
    first.fields["b"] = first.metrics["c"] = 1.0
    assert (second.messages, second.fields, second.metrics) == ([], {}, {})
    assert not second.done and second.reward == 0.0


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_environments_follow_the_protocol(name: str) -> None:
    environment = registry.resolve("environments", name)
    assert dataclasses.is_dataclass(environment)
    turns = ("play",) if hasattr(environment, "play") else ("reset", "step")
    methods = [getattr(environment, method) for method in (*turns, "close")]
    # What runs in threads may be plain functions.
    assert all(inspect.iscoroutinefunction(method) or getattr(environment, "blocking", False) for method in methods)
