"""How models are asked: retries, limits, which copy, and what is passed on; over real HTTP and with actors played."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollcli.cluster import asked as module
from rollcli.cluster.asked import AskedModels, Asker
from rollcli.cluster.mailbox import Mailbox
from rollcli.config.schema import ModelConfig, RewardConfig, RewardModelConfig
from rollcli.errors import WorkerDied
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import RewardFailure
from tests.rewards.endpoints import Server, served

FIELDS = {"messages": [{"role": "user", "content": "70 + 2?"}], "answer": "72", "response": "72"}


class Actor:
    """A judge of one text, or one that dies; its methods are called as Ray calls them."""

    def __init__(self, reply: Any) -> None:
        self.reply, self.mailbox, self.dropped = reply, Mailbox(), []
        for name in ("submit", "collect", "abort"):
            setattr(self, name, type("Method", (), {"remote": staticmethod(getattr(self, f"_{name}"))}))

    async def _submit(self, client: str, requests: list) -> None:
        if isinstance(self.reply, Exception):
            raise self.reply
        for key, _ in requests if self.reply is not None else ():
            self.mailbox.post(client, key, self.reply)

    async def _collect(self, client: str) -> list:
        return await self.mailbox.collect(client)

    def _abort(self, client: str, keys: list[int]) -> None:
        self.dropped += keys


def models(*actors: Actor, **options: Any) -> AskedModels:
    made = AskedModels([RewardModelConfig("j", ModelConfig("some/model"), **options)], "me", 1)
    made.connect({"judge.j": actors})
    return made


def score(made: AskedModels, times: int = 1, **options: Any) -> list[Any]:
    reward = RewardConfig("judge", args={"model": "j"}, **options)

    async def main() -> list[Any]:
        asker = Asker(made)
        return await asyncio.gather(*(asker.score(reward, FIELDS) for _ in range(times)), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(main(), 30))


def over_http(server: Server, times: int = 1, *, timeout_s: float = 20.0, retries: int = 0, **args: Any) -> list[Any]:
    reward = RewardConfig("judge", 1.0, timeout_s, retries, args={"model": "big", "endpoint": server.url, **args})

    async def main() -> list[Any]:
        asker = Asker(AskedModels([], "me", 1))
        found = await asyncio.gather(*(asker.score(reward, FIELDS) for _ in range(times)))
        for asking, _ in asker._made.values():
            await asking._endpoint._session.close()
        return found

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_an_endpoint_that_answers_right():
    with served() as server:
        assert over_http(server, 20, at_once=4) == [RewardResult(0.8)] * 20
        assert len(server.bodies) == 20


def test_an_endpoint_that_answers_nonsense_is_asked_again_and_then_fails():
    with served() as server:
        server.reply = "I like it."
        (failure,) = over_http(server, retries=2)
        assert failure.kind == "judge" and "gives no verdict" in failure.message and len(server.bodies) == 3


def test_an_endpoint_that_is_down_for_a_while(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.001)
    with served() as server:
        server.failures = 2
        assert over_http(server, retries=2) == [RewardResult(0.8)]
        server.failures = 9
        (failure,) = over_http(server, retries=1)
        assert failure.kind == "judge" and "HTTP status 500" in failure.message and len(server.bodies) == 3 + 2
    (failure,) = over_http(server)
    assert failure.kind == "judge" and "not to be reached" in failure.message


def test_an_endpoint_that_hangs_costs_the_time_limit_and_is_asked_again():
    with served() as server:
        server.hangs = 1
        assert over_http(server, timeout_s=0.4, retries=1) == [RewardResult(0.8)]
        server.hangs = 9
        (failure,) = over_http(server, timeout_s=0.2)
        assert failure.kind == "timeout" and "within 0.2 s" in failure.message


def test_the_least_busy_copy_is_asked():
    first, second = Actor(None), Actor("Score: 10")
    made = models(first, second)

    async def main() -> None:
        asker = Asker(made)
        reward = RewardConfig("judge", args={"model": "j"})
        waiting = asyncio.create_task(asker.score(reward, FIELDS))
        await asyncio.sleep(0)
        assert await asker.score(reward, FIELDS) == RewardResult(1.0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert first.dropped == [0]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_what_a_model_cannot_take_is_a_failure_and_its_end_is_passed_on():
    (failure,) = score(models(Actor(RewardFailure("judge", "too long"))))
    assert failure == RewardFailure("judge", "reward `judge`: too long")
    (failure,) = score(models(Actor(None)), timeout_s=0.1)
    assert failure.kind == "timeout"
    (ended,) = score(models(Actor(WorkerDied("gone", worker="judge.j-0"))), retries=3)
    assert isinstance(ended, WorkerDied)
    (failure,) = score(AskedModels([], "me", 1))
    assert "no reward model `j`" in failure.message


def test_a_successor_is_asked():
    made = models(Actor(None))
    made.reconnect("judge.j", 0, Actor("Score: 5"))
    made.reconnect("judge.other", 0, Actor(None))  # of nobody it knows
    assert score(made) == [RewardResult(0.5)]


@pytest.mark.parametrize(("shared", "rows"), [(1, 20), (3, 6), (100, 1)])
def test_workers_share_what_the_copies_take(shared, rows):
    config = RewardModelConfig("j", ModelConfig("some/model"), replicas=2, max_rows=10)
    made = AskedModels([config], "me", shared)
    assert (made.rows("j"), made.rows("other")) == (rows, 1)


def test_only_registered_names_ask():
    asker = Asker(AskedModels([], "me", 1))
    names = ("judge", "reward_model", "math", "gone", "./mine.py:Judge", "rollcli.rewards.judge:Judge")
    assert [asker.asks(RewardConfig(name)) for name in names] == [True, True, False, False, False, False]
