"""Places on replicas: least loaded first, first come first served, never more than there is room for."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from rollcli.rollout.router import Router

LIMIT_S = 30


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def test_least_loaded_first_and_ties_to_the_lower():
    async def main() -> None:
        router = Router(3)
        async with router.place(8) as a, router.place(4) as b, router.place(4) as c, router.place(1) as d:
            assert [place.replica for place in (a, b, c, d)] == [0, 1, 2, 1]
            assert router.load == [8, 5, 4]
        assert router.load == [0, 0, 0]

    run(main())


def test_load_is_given_back_when_a_group_fails_and_only_once():
    async def main() -> None:
        router = Router(2)
        with pytest.raises(ValueError):
            async with router.place(4) as place:
                place.give_back()
                raise ValueError
        assert router.load == [0, 0]
        place.give_back()  # a sibling that ends after its group has failed
        assert router.load == [0, 0]

    run(main())


def test_a_group_waits_for_room_and_comes_in_turn():
    async def main() -> None:
        router, entered = Router(1, capacity=4), []
        leave = {name: asyncio.Event() for name in "abc"}

        async def group(name: str, samples: int) -> None:
            async with router.place(samples):
                entered.append(name)
                await leave[name].wait()

        tasks = [asyncio.create_task(group(name, samples)) for name, samples in (("a", 4), ("b", 3), ("c", 1))]
        await asyncio.sleep(0.01)
        assert (entered, router.waiting) == (["a"], 4)
        leave["a"].set()
        await asyncio.sleep(0.01)
        assert (entered, router.waiting, router.load) == (["a", "b", "c"], 0, [4])
        for event in leave.values():
            event.set()
        await asyncio.gather(*tasks)
        assert router.load == [0]

    run(main())


def test_samples_that_are_done_make_room_before_their_group_is():
    async def main() -> None:
        router = Router(1, capacity=4)
        async with router.place(4) as place:
            second = asyncio.create_task(router.place(2).__aenter__())
            await asyncio.sleep(0.01)
            assert not second.done()
            place.give_back(2)
            assert (await second).replica == 0 and router.load == [4]

    run(main())


def test_a_group_larger_than_the_capacity_is_let_in_alone():
    async def main() -> None:
        router = Router(1, capacity=4)
        async with router.place(9):
            other = asyncio.create_task(router.place(1).__aenter__())
            await asyncio.sleep(0.01)
            assert not other.done()
        await other
        assert router.load == [1]

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_cancelled_nobody_waits_for_ever_and_no_load_is_lost(seed):
    async def main() -> None:
        chance, router, served = random.Random(seed), Router(2, capacity=8), 0

        async def group() -> None:
            nonlocal served
            async with router.place(4) as place:
                assert max(router.load) <= 8
                for _ in range(4):
                    await asyncio.sleep(chance.choice([0, 0.0005]))
                    place.give_back()
                served += 1

        tasks = [asyncio.create_task(group()) for _ in range(60)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if chance.random() < 0.2:
                chance.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert router.load == [0, 0] and router.waiting == 0 and served > 0
        await group()

    run(main())


def test_nobody_new_is_let_in_on_a_closed_replica_until_it_opens_again():
    async def main() -> None:
        router = Router(2, capacity=4)
        async with router.place(4) as first:
            assert first.replica == 0
            router.close(0)
            async with router.place(4) as second:
                assert second.replica == 1
                third = asyncio.create_task(router.place(4).__aenter__())
                first.give_back(4)  # there is room on 0, which takes nobody
                await asyncio.sleep(0.01)
                assert not third.done() and router.waiting == 4
                router.reopen(0)
                assert (await third).replica == 0 and router.waiting == 0
        assert router.load == [4, 0]

    run(main())


def test_the_last_replica_is_not_closed():
    router = Router(2)
    router.close(1)
    router.close(1)
    with pytest.raises(ValueError, match="replica 0 is the last one"):
        router.close(0)
    assert router.open == [True, False] and router.least_loaded() == 0


def test_a_replica_that_is_new_takes_groups():
    async def main() -> None:
        router = Router(1)
        async with router.place(3):
            router.reopen(2)
            assert router.open == [True, False, True] and router.load == [3, 0, 0]
            async with router.place(1) as place:
                assert place.replica == 2

    run(main())
