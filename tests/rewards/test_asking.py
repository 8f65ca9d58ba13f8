"""What asks a model is told from what does not."""

from __future__ import annotations

import pytest

from rollcli import registry
from rollcli.rewards.asking import AskingReward, Question, is_asking


@pytest.mark.parametrize("name", sorted(registry.builtin("rewards")))
def test_two_built_in_rewards_ask(name):
    assert is_asking(registry.resolve("rewards", name)) == (name in ("judge", "reward_model"))


def test_what_asks_must_score():
    with pytest.raises(TypeError):
        AskingReward()
    assert not is_asking(Question) and not is_asking(lambda response: 1.0)
