"""Every turn is scored by itself, with what was said up to it."""

from __future__ import annotations

from typing import Any

import pytest

from rollcli.config.schema import RewardConfig, TaskConfig
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import RewardFailure
from rollcli.rollout.turn_scores import divided, merged
from tests.rollout.doubles import Model
from tests.rollout.test_episode import World, play

REWARDS = [RewardConfig("last"), RewardConfig("each", weight=0.5, per_turn=True)]
CONFIG = TaskConfig("t", None, REWARDS, World())


def test_turns_are_asked_one_by_one_and_rewarded_where_they_were_earned():
    asked = []

    async def score(config: TaskConfig, fields: dict[str, Any]) -> list[RewardResult]:
        asked.append(([reward.name for reward in config.rewards], fields))
        if config.rewards[0].name == "last":
            return [RewardResult(1.0)]
        return [RewardResult(float(len(fields["response"])), {"n": fields["turn"]}, accuracy=0.25)]

    done = play(World(), Model("ab.", "c.", "def."), score, config=CONFIG)
    turns = [
        (fields["turn"], fields["response"], len(fields["messages"])) for names, fields in asked if "turn" in fields
    ]
    assert turns == [(0, "ab", 1), (1, "c", 3), (2, "def", 5)]
    assert [names for names, _ in asked] == [["last"], ["each"], ["each"], ["each"]]
    assert "seen1" in asked[2][1]["prompt"] and "seen2" not in asked[2][1]["prompt"]
    # The world gives 1/4, 2/4, 3/4.
    assert done.turn_rewards == [0.25 + 1.0, 0.5 + 0.5, 0.75 + 1.5]
    assert done.rewards == {"last": 1.0, "each": 6.0} and done.reward == 1.5 + 1.0 + 0.5 * 6
    assert done.accuracy == 1.0 and done.metrics["each/n"] == 1.0


def test_scores_are_in_the_order_of_the_task_and_one_failed_turn_fails_its_reward():
    config = TaskConfig(
        "t", None, [RewardConfig("a", per_turn=True), RewardConfig("b"), RewardConfig("c", per_turn=True)]
    )
    ends, turns = divided(config)
    assert [r.name for r in ends.rewards] == ["b"] and [r.name for r in turns.rewards] == ["a", "c"]
    failure = RewardFailure("timeout", "too long")
    one, two = RewardResult(1.0), RewardResult(0.0)
    assert merged(config, [one], [[one, two], [two, failure]]) == [
        RewardResult(1.0, {}, 0.5), one, failure,
    ]  # fmt: skip


@pytest.mark.parametrize(("on_error", "usable"), [("zero", True), ("drop", False)])
def test_a_failed_turn_follows_the_recipe(on_error, usable):
    async def score(config: TaskConfig, fields: dict[str, Any]) -> list:
        return [RewardFailure("timeout", "too long") if fields["turn"] == 1 else RewardResult(1.0)]

    config = TaskConfig("t", None, [RewardConfig("each", per_turn=True, on_error=on_error)], World())
    done = play(World(), Model("ab.", "c.", "def."), score, config=config)
    assert done.usable is usable and done.reward == 1.5 and done.turn_rewards == [0.25, 0.5, 0.75]
