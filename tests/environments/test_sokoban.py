"""A level is solved by pushing, and boxes are rewarded as they arrive."""

import asyncio

from rollcli.data.carriers import Task
from rollcli.environments.sokoban import Sokoban

LEVEL = "#######\n#.$@$.#\n#######"


def test_boxes_and_solution_are_rewarded() -> None:
    game = Sokoban(box_reward=0.5, moves_per_turn=2)
    asyncio.run(game.reset(Task("t", 0, [], {"level": LEVEL})))
    first = asyncio.run(game.step("L"))
    assert (first.reward, first.done) == (0.5, False)
    assert first.messages[0]["content"] == game.state_key() == "#######\n#*@ $.#\n#######"
    last = asyncio.run(game.step("right, right"))
    assert (last.reward, last.done, last.fields["done_reason"]) == (1.5, True, "solved")
