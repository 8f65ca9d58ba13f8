"""A problem whose first answer ends the episode."""

import asyncio

from rollcli.data.carriers import Task
from rollcli.environments.single_turn import SingleTurn


def test_one_answer_ends_the_episode() -> None:
    async def play():
        environment = SingleTurn()
        opened = await environment.reset(Task("t", 0, [{"role": "user", "content": "1+1?"}], {"answer": "2"}))
        result = await environment.step("2")
        await environment.close()
        return opened, result

    opened, result = asyncio.run(play())
    assert opened == [{"role": "user", "content": "1+1?"}]
    assert result.done and result.reward == 0 and result.messages == [] and result.fields == {}
