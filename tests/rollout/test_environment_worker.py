"""The worker around many episodes: each answered, aborted ones gone, and errors of the run handed on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollcli.cluster.mailbox import Caller, Mailbox
from rollcli.cluster.worker import Worker
from rollcli.config.schema import RewardConfig, TaskConfig
from rollcli.engines.base import Completion, SamplingParams
from rollcli.environments.single_turn import SingleTurn
from rollcli.errors import EngineError
from rollcli.rewards.base import RewardResult
from rollcli.rollout import environment_worker as module
from rollcli.rollout.environment_worker import EnvironmentWorker, EpisodeOrder
from tests.rollout.doubles import Format, Method, task

LIMIT_S = 30


class Replica:
    """Samples one token, the first of the prompt, after `hold` is set; keeps what it was asked and told."""

    def __init__(self, fail: bool = False) -> None:
        self.mailbox = Mailbox()
        self.hold = asyncio.Event()
        self.hold.set()
        self.asked: list[tuple[int, Any]] = []
        self.aborted: list[tuple[str, list[int]]] = []
        self.fail = fail
        self.submit, self.abort = Method(self._submit), Method(self._abort)
        self.collect = Method(self.mailbox.collect)

    async def _submit(self, client: str, requests: list) -> None:
        if self.fail:
            raise EngineError("the engine failed")
        self.asked += requests
        await self.hold.wait()
        for key, request in requests:
            columns = request.prompt[:1], np.zeros(1, np.float32), np.zeros(1, np.int32)
            self.mailbox.post(client, key, Completion(request.id, *columns, "stop"))

    async def _abort(self, client: str, keys: list[int]) -> None:
        self.aborted.append((client, keys))


class Rewards:
    """Scores 1 for each reward of the task."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.asked = 0
        self.submit = Method(self._submit)
        self.collect = Method(self.mailbox.collect)

    async def _submit(self, client: str, requests: list) -> None:
        self.asked += len(requests)
        for key, request in requests:
            self.mailbox.post(client, key, [RewardResult(1.0) for _ in request.rewards])


@pytest.fixture
def worker(monkeypatch) -> EnvironmentWorker:
    def init(self: Worker, spec: Any) -> None:
        self.spec = spec
        tasks = [TaskConfig("t", None, [RewardConfig("r")], SingleTurn()), TaskConfig("free", None, [], SingleTurn())]
        self.recipe = SimpleNamespace(model=None, tasks=tasks, rollout=SimpleNamespace(episode_timeout_s=20.0))

    monkeypatch.setattr(Worker, "__init__", init)
    monkeypatch.setattr(module, "load_chat_format", lambda model: Format())
    return EnvironmentWorker(SimpleNamespace(name="environment-0"))


class Handle:
    """A worker as its caller sees it."""

    def __init__(self, worker: EnvironmentWorker) -> None:
        self.submit, self.collect = Method(worker.submit), Method(worker.collect)


def order(index: int, sample: int = 0, replica: int = 0) -> EpisodeOrder:
    return EpisodeOrder(task(index), sample, replica, SamplingParams(max_tokens=5))


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def test_many_episodes_go_to_their_replica_and_the_free_reward_worker(worker):
    async def main() -> None:
        replicas, rewards = [Replica(), Replica()], [Rewards(), Rewards()]
        worker.connect(replicas, rewards, 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        orders = [order(index, sample, index % 2) for index in range(20) for sample in range(4)]
        reports = await asyncio.gather(*(caller.call(each) for each in orders))
        for each, report in zip(orders, reports):
            assert report.error is None and report.trajectory.reward == 1.0
            assert (report.trajectory.task_id, report.trajectory.sample) == (each.task.id, each.sample)
        assert [len(replica.asked) for replica in replicas] == [40, 40]
        assert [reward.asked for reward in rewards] == [40, 40]
        assert reports[-1].states == {} and worker.census.snapshot() == {}

    run(main())


def test_a_task_without_rewards_is_not_sent_to_be_scored(worker):
    async def main() -> None:
        rewards = Rewards()
        worker.connect([Replica()], [rewards], 50, 100)
        free = EpisodeOrder(task(0).__class__("free", 0, task(0).messages), 0, 0, SamplingParams(max_tokens=5))
        report = await Caller(Handle(worker), "scheduler", "environment-0").call(free)
        assert report.trajectory.usable and rewards.asked == 0

    run(main())


def test_abort_ends_every_episode_and_its_requests(worker):
    async def main() -> None:
        replica = Replica()
        replica.hold.clear()
        worker.connect([replica], [Rewards()], 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        waiting = [asyncio.create_task(caller.call(order(n))) for n in range(3)]
        while len(replica.asked) < 3:
            await asyncio.sleep(0.001)
        await worker.abort_all()
        while worker._running:
            await asyncio.sleep(0.001)
        assert sorted(keys[0] for _, keys in replica.aborted) == sorted(key for key, _ in replica.asked)
        assert {client for client, _ in replica.aborted} == {"environment-0"}
        assert worker.replicas[0].in_flight == 0 and worker.census.snapshot() == {}
        assert not any(task.done() for task in waiting)
        for task_ in waiting:
            task_.cancel()
        replica.hold.set()
        assert (await caller.call(order(7))).trajectory.usable

    run(main())


def test_what_ends_the_run_is_reported_not_swallowed(worker):
    async def main() -> None:
        worker.connect([Replica(fail=True)], [Rewards()], 50, 100)
        report = await Caller(Handle(worker), "scheduler", "environment-0").call(order(0))
        assert report.trajectory is None and isinstance(report.error, EngineError)

    run(main())


def test_a_fault_of_ours_is_reported_too(worker, capsys):
    async def main() -> None:
        worker.connect([Replica()], [Rewards()], 50, 100)
        strange = EpisodeOrder(task(0).__class__("unknown", 0, []), 0, 0, SamplingParams(max_tokens=5))
        report = await Caller(Handle(worker), "scheduler", "environment-0").call(strange)
        assert isinstance(report.error, KeyError)

    run(main())
    assert "KeyError" in capsys.readouterr().err
