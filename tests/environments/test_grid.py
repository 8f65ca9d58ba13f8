"""Several moves a turn, rewards of each, and what ends a game."""

import asyncio
from dataclasses import dataclass

from rollcli.environments.grid import GridGame


@dataclass
class Corridor(GridGame):
    """Solved three to the right, lost one to the left."""

    def start(self, task):
        self.at = 0

    def move(self, letter):
        self.at += {"R": 1, "L": -1}.get(letter, 0)
        return 0.0, "solved" if self.at == 3 else "lost" if self.at < 0 else ""

    def render(self):
        return f"at {self.at}"


def test_moves_after_the_end_are_not_played_and_rewards_add_up() -> None:
    game = Corridor(moves_per_turn=5, move_reward=-0.25)
    asyncio.run(game.reset(type("Task", (), {"messages": []})))
    result = asyncio.run(game.step("RRRLL"))
    assert (result.done, result.reward, game.at, result.fields["success"]) == (True, 0.25, 3, 1.0)


def test_more_moves_than_a_turn_has_are_not_played() -> None:
    game = Corridor(moves_per_turn=2)
    asyncio.run(game.reset(type("Task", (), {"messages": []})))
    result = asyncio.run(game.step("RRR"))
    assert not result.done and result.messages == [{"role": "user", "content": "at 2"}] and game.state_key() == "at 2"


def test_options_without_sense_are_named() -> None:
    assert {key for key, _ in Corridor(max_turns=0, move_reward=float("nan")).problems()} == {
        "max_turns",
        "move_reward",
    }
