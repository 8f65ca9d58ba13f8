"""FrozenLake is gymnasium's, step for step."""

import asyncio
import random

import pytest

from rollcli.data.carriers import Task
from rollcli.data.sources.frozen_lake import FrozenLakeSource
from rollcli.environments.frozen_lake import FrozenLake


def opened(environment: FrozenLake, seed: int = 7, **options) -> Task:
    problem = FrozenLakeSource(**options).open("train", 3)[seed]
    task = Task("lake", 0, problem.messages, problem.payload, seed)
    asyncio.run(environment.reset(task))
    return task


@pytest.mark.parametrize("is_slippery", [False, True])
def test_transitions_are_those_of_gymnasium(is_slippery: bool) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    for seed in range(20):
        environment = FrozenLake(max_turns=100)
        task = opened(environment, seed, is_slippery=is_slippery)
        own = gymnasium.make("FrozenLake-v1", desc=task.payload["map"].split(), is_slippery=is_slippery)
        own.reset(seed=seed)
        moves = random.Random(seed)
        for _ in range(40):
            action = moves.randrange(4)
            at, reward, is_over, _, _ = own.step(action)
            result = asyncio.run(environment.step(["left", "down", "right", "up"][action]))
            assert (result.done, result.reward) == (is_over, reward)
            assert environment.state_key().replace("\n", "").index("P") == at
            if is_over:
                assert result.fields["done_reason"] == ("solved" if reward else "lost")
                break


def test_the_turn_budget_ends_it_and_an_invalid_turn_says_what_is_valid() -> None:
    pytest.importorskip("gymnasium")
    environment = FrozenLake(max_turns=2, invalid_reward=-0.5)
    opened(environment)
    first = asyncio.run(environment.step("what?"))
    assert "left, down, right, up" in first.messages[0]["content"]
    assert (first.reward, first.done, first.metrics["invalid_turns"]) == (-0.5, False, 1.0)
    second = asyncio.run(environment.step("up"))
    assert second.done and second.messages == [] and second.fields["done_reason"] == "max_turns"
    assert second.metrics["ended_max_turns"] == 1 and second.metrics["success"] == 0
