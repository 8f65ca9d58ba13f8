"""An environment that blocks holds up nobody but itself."""

import asyncio
import threading

import pytest

from rollcli.environments.blocking import perform


class Slow:
    """Blocks until the other one has played."""

    blocking = True

    def __init__(self) -> None:
        self.free = threading.Event()

    def step(self, response: str) -> str:
        assert self.free.wait(20)
        return response.upper()

    async def reset(self, task: str) -> str:
        await asyncio.sleep(0)
        return task

    def close(self) -> None:
        raise SystemExit(3)


def test_others_go_on_while_one_blocks() -> None:
    async def main() -> str:
        slow = Slow()
        waiting = asyncio.create_task(perform(slow, "step", "a"))
        assert await perform(slow, "reset", "task") == "task"
        slow.free.set()
        return await waiting

    assert asyncio.run(main()) == "A"


def test_what_it_raises_reaches_the_episode() -> None:
    with pytest.raises(SystemExit):
        asyncio.run(perform(Slow(), "close"))
