"""Many requests in few calls, and nobody left waiting whatever happens to the actor."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from ray import cloudpickle

from rollcli.cluster import mailbox as module
from rollcli.cluster.mailbox import Caller, Mailbox
from rollcli.errors import EngineError, WorkerDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LIMIT_S = 60


class Method:
    """Stands for a remote method: `remote` starts it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = lambda *arguments: asyncio.ensure_future(function(*arguments))


class Echo:
    """Answers requests with their double, those of one submit in `order`; counts its calls."""

    def __init__(self, order: Callable[[list], list] = list) -> None:
        self.mailbox = Mailbox()
        self.order = order
        self.submits: list[list[Any]] = []
        self.submit = Method(self._submit)
        self.collect = Method(self.mailbox.collect)

    async def _submit(self, client: str, requests: list[tuple[int, Any]]) -> None:
        self.submits.append([request for _, request in requests])
        for key, request in self.order(requests):
            if request != "never":
                self.mailbox.post(client, key, request * 2)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def reversed_list(items: list) -> list:
    return items[::-1]


@pytest.mark.parametrize("order", [list, reversed_list])
def test_calls_of_a_moment_travel_together_and_come_back_to_who_asked(order):
    async def main() -> None:
        actor = Echo(order)
        caller = Caller(actor, "me", "echo-0")
        assert await asyncio.gather(*(caller.call(n) for n in range(500))) == [2 * n for n in range(500)]
        assert actor.submits == [list(range(500))]
        assert await caller.call(7) == 14
        assert len(actor.submits) == 2 and caller.in_flight == 0

    run(main())


def test_results_are_not_lost_between_two_collects(monkeypatch):
    monkeypatch.setattr(module, "COLLECT_LIMIT_S", 0.001)

    async def main() -> None:
        box, random_ = Mailbox(), random.Random(0)

        async def post() -> None:
            for key in range(200):
                await asyncio.sleep(random_.choice([0, 0.0009, 0.001, 0.0011]))
                box.post("me", key, key)

        posting = asyncio.create_task(post())
        seen: list[int] = []
        while len(seen) < 200:
            seen += [key for key, _ in await box.collect("me")]
        await posting
        assert seen == list(range(200))

    run(main())


def test_clients_do_not_get_each_others_results():
    async def main() -> None:
        actor = Echo()
        one, other = Caller(actor, "one", "echo"), Caller(actor, "other", "echo")
        assert await asyncio.gather(one.call(1), other.call(10), one.call(2)) == [2, 20, 4]

    run(main())


def test_forgotten_requests_are_not_sent_and_late_results_are_ignored():
    async def main() -> None:
        actor = Echo()
        caller = Caller(actor, "me", "echo")
        key, future = caller.start(1)
        kept = caller.start(2)[1]
        caller.forget(key)
        assert await kept == 4 and future.cancelled()
        assert actor.submits == [[2]]
        sent, _ = caller.start("never")
        while len(actor.submits) < 2:
            await asyncio.sleep(0)
        caller.forget(sent)
        actor.mailbox.post("me", sent, "late")
        assert await caller.call(3) == 6 and caller.in_flight == 0

    run(main())


def test_cancelled_call_leaves_nothing_behind():
    async def main() -> None:
        caller = Caller(Echo(), "me", "echo")
        call = asyncio.create_task(caller.call("never"))
        await asyncio.sleep(0)
        assert caller.in_flight == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert caller.in_flight == 0

    run(main())


def test_reset_drops_all_and_the_caller_works_on():
    async def main() -> None:
        actor = Echo()
        caller = Caller(actor, "me", "echo")
        futures = [caller.start(n)[1] for n in range(3)]
        caller.reset()
        assert all(future.cancelled() for future in futures) and caller.in_flight == 0
        assert await caller.call(4) == 8
        assert actor.submits == [[4]]

    run(main())


def test_refused_requests_raise_and_others_are_answered():
    async def main() -> None:
        actor = Echo()
        echo = actor._submit

        async def submit(client: str, requests: list) -> None:
            if any(request == "bad" for _, request in requests):
                raise EngineError("already in flight")
            await echo(client, requests)

        actor.submit = Method(submit)
        caller = Caller(actor, "me", "echo")
        good = asyncio.create_task(caller.call("never"))
        await asyncio.sleep(2 * module.GATHER_S)
        with pytest.raises(EngineError, match="already in flight"):
            await caller.call("bad")
        assert not good.done() and await caller.call(1) == 2
        good.cancel()

    run(main())


def test_requests_that_cannot_be_sent_raise():
    async def main() -> None:
        actor = Echo()

        def remote(*_: Any) -> None:
            raise TypeError("cannot be serialized")

        actor.submit.remote = remote
        with pytest.raises(TypeError, match="serialized"):
            await Caller(actor, "me", "echo").call(1)

    run(main())


def test_failing_collect_raises_in_every_call():
    async def main() -> None:
        actor = Echo()

        async def collect(client: str) -> list:
            await asyncio.sleep(0.01)
            raise EngineError("the engine failed")

        actor.collect = Method(collect)
        caller = Caller(actor, "me", "echo")
        results = await asyncio.gather(*(caller.call("never") for _ in range(3)), return_exceptions=True)
        assert [str(result) for result in results] == ["the engine failed"] * 3

    run(main())


class Mortal:
    """A real actor that answers, or dies."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()

    async def submit(self, client: str, requests: list) -> None:
        for key, request in requests:
            if request == "die":
                os._exit(1)
            if request != "never":
                self.mailbox.post(client, key, request * 2)

    async def collect(self, client: str) -> list:
        return await self.mailbox.collect(client)

    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("how", ["os._exit", "SIGKILL", "ray.kill"])
def test_death_of_an_actor_raises_in_every_call(ray, how):
    async def main() -> None:
        actor = ray.remote(Mortal).remote()
        caller = Caller(actor, "me", "environment-3")
        assert await asyncio.gather(*(caller.call(n) for n in range(20))) == [2 * n for n in range(20)]
        waiting = [asyncio.create_task(caller.call("never")) for _ in range(5)]
        pid = await actor.pid.remote()
        if how == "os._exit":
            waiting.append(asyncio.create_task(caller.call("die")))
        elif how == "SIGKILL":
            os.kill(pid, signal.SIGKILL)
        else:
            ray.kill(actor)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, WorkerDied) and "`environment-3` died" in str(result) for result in results)
        with pytest.raises(WorkerDied):
            await caller.call(1)

    run(main())
