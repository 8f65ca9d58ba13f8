"""The worker around many episodes: each answered, aborted ones gone, and errors of the run handed on."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rollcli
from rollcli.cluster.mailbox import Caller, Mailbox
from rollcli.cluster.worker import Worker
from rollcli.config.schema import RewardConfig, TaskConfig
from rollcli.engines.base import Completion, SamplingParams
from rollcli.environments.single_turn import SingleTurn
from rollcli.errors import EngineError, WorkerDied
from rollcli.rewards.base import RewardResult
from rollcli.rollout import environment_worker as module
from rollcli.rollout.environment_worker import BLOCKED, EnvironmentWorker, EpisodeOrder, reward_role
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


class Sampler:
    """Samples one token a millisecond: the position of its draw, above the budget never; ends what is aborted."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.mailbox = Mailbox()
        self.asked: list[Any] = []
        self.aborted: set[int] = set()
        self.made = 0
        self.running: list[asyncio.Future] = []
        self.pace = asyncio.Event()
        self.pace.set()
        self.submit, self.abort = Method(self._submit), Method(self._abort)
        self.collect = Method(self.mailbox.collect)

    async def _submit(self, client: str, requests: list) -> None:
        for key, request in requests:
            self.asked.append(request)
            self.running.append(asyncio.ensure_future(self._run(client, key, request)))

    async def _run(self, client: str, key: int, request: Any) -> None:
        tokens: list[int] = []
        while len(tokens) < request.sampling.max_tokens and key not in self.aborted:
            await asyncio.sleep(0.001)
            if self.pace.is_set():
                tokens.append(request.drawn + len(tokens))
                self.made += 1
        reason = "abort" if len(tokens) < request.sampling.max_tokens else "length"
        columns = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), np.full(len(tokens), self.version)
        self.mailbox.post(client, key, Completion(request.id, *columns, reason))

    async def _abort(self, client: str, keys: list[int]) -> None:
        self.aborted |= set(keys)


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
        tasks = [
            TaskConfig("t", None, [RewardConfig("r")], SingleTurn()),
            TaskConfig("free", None, [], SingleTurn()),
            TaskConfig("own", None, [RewardConfig("r")], SingleTurn(), reward_workers=2),
        ]
        rollout = SimpleNamespace(episode_timeout_s=20.0, worker_timeout_s=300.0)
        self.recipe = SimpleNamespace(model=None, tasks=tasks, rollout=rollout)

    monkeypatch.setattr(Worker, "__init__", init)
    monkeypatch.setattr(module, "load_chat_formats", lambda recipe: {task.name: Format() for task in recipe.tasks})
    return EnvironmentWorker(SimpleNamespace(name="environment-0"))


class Handle:
    """A worker as its caller sees it."""

    def __init__(self, worker: EnvironmentWorker) -> None:
        self.submit, self.collect = Method(worker.submit), Method(worker.collect)


def order(index: int, sample: int = 0, replica: int = 0, name: str = "t", budget: int = 5) -> EpisodeOrder:
    return EpisodeOrder(dataclasses.replace(task(index), name=name), sample, replica, SamplingParams(budget))


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def test_many_episodes_go_to_their_replica_and_the_free_reward_worker(worker):
    async def main() -> None:
        replicas, rewards = [Replica(), Replica()], [Rewards(), Rewards()]
        worker.connect(replicas, {"reward": rewards}, 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        orders = [order(index, sample, index % 2) for index in range(20) for sample in range(4)]
        reports = await asyncio.gather(*(caller.call(each) for each in orders))
        for each, report in zip(orders, reports):
            assert report.error is None and report.trajectories[0].reward == 1.0
            assert (report.trajectories[0].task_id, report.trajectories[0].sample) == (each.task.id, each.sample)
        assert [len(replica.asked) for replica in replicas] == [40, 40]
        assert [reward.asked for reward in rewards] == [40, 40]
        assert reports[-1].states == {} and worker.census.snapshot() == {}

    run(main())


def test_a_task_without_rewards_is_not_sent_to_be_scored(worker):
    async def main() -> None:
        rewards = Rewards()
        worker.connect([Replica()], {"reward": [rewards]}, 50, 100)
        report = await Caller(Handle(worker), "scheduler", "environment-0").call(order(0, name="free"))
        assert report.trajectories[0].usable and rewards.asked == 0

    run(main())


def test_abort_ends_every_episode_and_its_requests(worker):
    async def main() -> None:
        replica = Replica()
        replica.hold.clear()
        worker.connect([replica], {"reward": [Rewards()]}, 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        waiting = [asyncio.create_task(caller.call(order(n))) for n in range(3)]
        while len(replica.asked) < 3:
            await asyncio.sleep(0.001)
        await worker.abort_all()
        while worker._running:
            await asyncio.sleep(0.001)
        assert sorted(keys[0] for _, keys in replica.aborted) == sorted(key for key, _ in replica.asked)
        assert {client for client, _ in replica.aborted} == {worker.replicas[0].client}
        assert worker.replicas[0].in_flight == 0 and worker.census.snapshot() == {}
        assert not any(task.done() for task in waiting)
        for task_ in waiting:
            task_.cancel()
        replica.hold.set()
        assert (await caller.call(order(7))).trajectories[0].usable

    run(main())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_task_with_reward_workers_of_its_own_is_scored_by_them_alone(worker):
    async def main() -> None:
        shared, own = [Rewards()], [Rewards(), Rewards()]
        worker.connect([Replica()], {"reward": shared, "reward.own": own}, 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        await asyncio.gather(*(caller.call(order(n, name="own")) for n in range(10)))
        assert (shared[0].asked, sorted(each.asked for each in own)) == (0, [5, 5])
        await caller.call(order(0))
        assert shared[0].asked == 1

    assert reward_role(TaskConfig("own", None, reward_workers=1)) == "reward.own"
    assert reward_role(TaskConfig("own", None)) == "reward"
    run(main())


def test_chosen_episodes_are_aborted_and_the_others_go_on(worker):
    async def main() -> None:
        replica = Replica()
        replica.hold.clear()
        worker.connect([replica], {"reward": [Rewards()]}, 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        started = [caller.start(order(n)) for n in range(4)]
        other = Caller(Handle(worker), "evaluation", "environment-0")
        elses = asyncio.create_task(other.call(order(9)))
        await until(lambda: len(replica.asked) == 5)
        # A key that has ended, or never was, is ignored.
        await worker.abort("scheduler", [started[1][0], started[3][0], 99])
        await until(lambda: len(replica.aborted) == 2)
        replica.hold.set()
        for place in (0, 2):
            assert (await started[place][1]).trajectories[0].task_id == f"t/{place}"
        assert (await elses).trajectories[0].usable
        await asyncio.sleep(0.02)
        assert not started[1][1].done() and not started[3][1].done() and worker.census.snapshot() == {}
        caller.reset()

    run(main())


@pytest.mark.parametrize("cut", [0, 4])
def test_an_answer_on_a_replica_that_is_taken_out_goes_on_on_another_within_its_budget(worker, cut):
    async def main() -> None:
        first, second = Sampler(0), Sampler(1)
        worker.connect([first, second], {"reward": [Rewards()]}, 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        first.pace.clear()
        answer = asyncio.create_task(caller.call(order(3, budget=10)))
        await until(lambda: first.asked)
        first.pace.set()
        await until(lambda: first.made >= cut)
        first.pace.clear()
        worker.reroute(0, 1)
        trajectory = (await answer).trajectories[0]
        sampled = trajectory.tokens[trajectory.loss_mask].tolist()
        assert sampled == list(range(10)) and trajectory.stop_reason == "length"
        versions = trajectory.versions[trajectory.loss_mask].tolist()
        made = versions.count(0)
        assert versions == [0] * made + [1] * (10 - made) and made >= cut
        [rest] = second.asked
        assert (rest.drawn, rest.sampling.max_tokens) == (made, 10 - made)
        begun = first.asked[0]
        assert rest.seed == begun.seed and rest.prompt.tolist() == [*begun.prompt, *range(made)]
        # What is ordered from the replica that is out goes to the other; once it is in again, to itself.
        await caller.call(order(4, replica=0))
        assert (len(first.asked), len(second.asked)) == (1, 2)
        worker.reroute(0, 0)
        first.pace.set()
        await caller.call(order(5, replica=0))
        assert (len(first.asked), len(second.asked)) == (2, 2)

    run(main())


def test_a_replica_that_is_out_for_one_that_is_out_too(worker):
    async def main() -> None:
        samplers = [Sampler(n) for n in range(3)]
        worker.connect(samplers, {"reward": [Rewards()]}, 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        worker.reroute(0, 1)
        worker.reroute(1, 2)
        await caller.call(order(1, replica=0))
        worker.reroute(1, 1)
        await caller.call(order(2, replica=0))
        assert [len(each.asked) for each in samplers] == [0, 1, 1]

    run(main())


def test_a_successor_is_asked_from_now_on_and_errors_name_who_ended(worker):
    async def main() -> None:
        class Dead(Replica):
            async def _submit(self, client: str, requests: list) -> None:
                raise WorkerDied("worker `rollout-1` died", worker="rollout-1", exit_code=3)

        # Before it knows anybody, there is nobody to be replaced.
        worker.reconnect("rollout", 0, Replica())
        worker.reconnect("reward", 0, Rewards())
        rewards, successor = [Rewards(), Rewards()], Replica()
        worker.connect([Replica(), Dead()], {"reward": rewards[:1]}, 50, 100)
        caller = Caller(Handle(worker), "scheduler", "environment-0")
        error = pickle.loads(pickle.dumps((await caller.call(order(0, replica=1))).error))
        assert (type(error), error.worker, error.exit_code, error.silent) == (WorkerDied, "rollout-1", 3, False)
        worker.reconnect("rollout", 1, successor)
        worker.reconnect("reward", 0, rewards[1])
        assert (await caller.call(order(0, replica=1))).trajectories[0].usable
        assert len(successor.asked) == 1 and [each.asked for each in rewards] == [0, 1]

    run(main())


def test_answers_to_a_predecessor_are_not_taken_for_its_own(worker):
    async def main() -> None:
        replica, rewards = Replica(), Rewards()
        replica.hold.clear()
        worker.connect([replica], {"reward": [rewards]}, 50, 100)
        asked = Caller(Handle(worker), "scheduler", "environment-0").start(order(3))
        await until(lambda: replica.asked)
        # The worker ends; its requests go on. Its successor's keys begin at 0 again.
        successor = EnvironmentWorker(worker.spec)
        successor.connect([replica], {"reward": [rewards]}, 50, 100)
        caller = Caller(Handle(successor), "scheduler", "environment-0")
        answer = asyncio.create_task(caller.call(dataclasses.replace(order(3, sample=1), sampling=SamplingParams(5))))
        await until(lambda: len(replica.asked) == 2)
        assert replica.asked[0][0] == replica.asked[1][0]
        assert successor.replicas[0].client != worker.replicas[0].client
        assert successor.rewards["reward"][0].client != worker.rewards["reward"][0].client
        replica.hold.set()
        assert (await answer).trajectories[0].sample == 1 and (await asked[1]).trajectories[0].sample == 0

    run(main())


BLOCKS = """
import asyncio, os, sys, time
from types import SimpleNamespace
from rollcli.cluster.worker import Worker
from rollcli.config.schema import TaskConfig
from rollcli.environments.single_turn import SingleTurn
from rollcli.rollout import environment_worker as module
from tests.rollout.doubles import Format
from tests.rollout.test_environment_worker import order
from dataclasses import dataclass

@dataclass
class Blocks(SingleTurn):
    async def reset(self, task):
        if task.index == 2:
            await asyncio.sleep(0.3)
            time.sleep(1e6)
        await asyncio.sleep(1e6)

def init(self, spec):
    self.spec = spec
    rollout = SimpleNamespace(episode_timeout_s=1e6, worker_timeout_s=1.0)
    self.recipe = SimpleNamespace(model=None, tasks=[TaskConfig("t", None, [], Blocks())], rollout=rollout)

Worker.__init__ = init
module.load_chat_formats = lambda recipe: {"t": Format()}
worker = module.EnvironmentWorker(SimpleNamespace(name="environment-0", logs=sys.argv[1]))

async def main():
    worker.connect([], {}, 50, 100)
    await worker.submit("scheduler", [(n, order(n, sample=5)) for n in range(4)])
    await asyncio.sleep(1e6)

asyncio.run(main())
"""


def test_a_worker_that_an_episode_blocks_ends_itself_and_leaves_the_name_of_the_episode(tmp_path):
    began = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", BLOCKS, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(rollcli.__file__).parents[1])])},
    )  # fmt: skip
    assert process.returncode == BLOCKED, process.stderr
    assert (tmp_path / "environment-0.ended").read_text() == "t/2/5\n"
    # The log shows where.
    assert "in reset" in process.stderr and time.monotonic() - began > 1


def test_what_ends_the_run_is_reported_not_swallowed(worker):
    async def main() -> None:
        worker.connect([Replica(fail=True)], {"reward": [Rewards()]}, 50, 100)
        report = await Caller(Handle(worker), "scheduler", "environment-0").call(order(0))
        assert not report.trajectories and isinstance(report.error, EngineError)

    run(main())


def test_the_end_of_a_worker_that_a_reward_worker_asked_is_reported(worker):
    class Ending(Rewards):
        async def _submit(self, client: str, requests: list) -> None:
            for key, _ in requests:
                self.mailbox.post(client, key, WorkerDied("gone", worker="judge.j-0"))

    async def main() -> None:
        worker.connect([Replica()], {"reward": [Ending()]}, 50, 100)
        report = await Caller(Handle(worker), "scheduler", "environment-0").call(order(0))
        assert isinstance(report.error, WorkerDied) and report.error.worker == "judge.j-0"

    run(main())


def test_a_fault_of_ours_is_reported_too(worker, capsys):
    async def main() -> None:
        worker.connect([Replica()], {"reward": [Rewards()]}, 50, 100)
        report = await Caller(Handle(worker), "scheduler", "environment-0").call(order(0, name="unknown"))
        assert isinstance(report.error, KeyError)

    run(main())
    assert "KeyError" in capsys.readouterr().err
