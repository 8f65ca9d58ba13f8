"""Real workers of every role, killed in the middle of their work: what was asked for comes out all the same.

Here is only what needs the workers together; replacing as such is tested in tests/cluster/test_supervisor.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle

from rollcli.cluster.autopsy import Autopsy
from rollcli.cluster.rollout_worker import RolloutWorker
from rollcli.cluster.supervisor import Supervisor
from rollcli.cluster.train_worker import TrainWorker
from rollcli.config.dump import to_values
from rollcli.config.load import load_recipe
from rollcli.data.carriers import Group
from rollcli.data.stream import TaskStream
from rollcli.engines.base import SamplingParams
from rollcli.errors import WorkerDied
from rollcli.pipelines import roles as module
from rollcli.pipelines.roles import Roles
from rollcli.rollout.groups import GroupRunner
from rollcli.rollout.router import Router

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LIMIT_S = 120
SAMPLING = SamplingParams(max_tokens=48)
GROUPS, SIZE = 24, 8
TWO_OF_EACH = [
    "rollout.replicas=2", "rollout.environment_workers=2", "rollout.reward_workers=2", "rollout.max_rows=16",
    "rollout.threads=1", "policy.threads=1", "policy.workers=2",
]  # fmt: skip


def digest(tensors: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


class Policy(TrainWorker):
    """The real worker, with weights that can be moved and seen."""

    def perturb(self, seed: int) -> dict[str, str]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.add_(torch.randn(local.shape, generator=generator), alpha=1e-3)
        return digest(self.engine.named_weights() or {})


class Replica(RolloutWorker):
    """The real worker, with weights that can be seen, and requests that were interrupted."""

    interrupted = 0

    async def abort(self, client: str, keys: list[int]) -> None:
        self.interrupted += len(keys)
        await super().abort(client, keys)

    def interruptions(self) -> int:
        return self.interrupted

    def holds(self) -> tuple[int, dict[str, str]]:
        return self.engine.version, digest(self.engine.model.state_dict())


class Stage:
    """Two workers of each role that samples, and one policy; a worker is killed when so many samples are done."""

    def __init__(self, folder: Path) -> None:
        loaded = load_recipe("grpo-math", TWO_OF_EACH)
        self.recipe, self.told = loaded.recipe, []
        self.roles = Roles(loaded.recipe, to_values(loaded.recipe, None), None, str(folder), {})
        self.supervisor = Supervisor(Autopsy(folder), 100, self.told.append, 60.0)
        self.roles.supervise(self.supervisor)
        self.router = Router(2, 16)
        self.runner = GroupRunner(self.roles.environments, self.router, self.supervisor, self.progress, 60.0)
        stream = TaskStream(self.recipe.tasks, 5)
        self.tasks = [stream.draw(0.0) for _ in range(GROUPS)]
        self.plan: dict[int, Callable[[], None]] = {}

    def progress(self, done: int, *_: Any) -> None:
        for at in [at for at in self.plan if done >= at]:
            self.plan.pop(at)()

    async def pid(self, name: str) -> int:
        role, _, rank = name.rpartition("-")
        (cluster,) = [cluster for cluster in self.roles.all if cluster.role == role]
        return (await cluster.workers[int(rank)].ready.remote())["pid"]

    async def kill(self, name: str) -> None:
        os.kill(await self.pid(name), signal.SIGKILL)

    async def sample(self, kills: dict[int, list[str]] | None = None) -> list[Group]:
        """Runs the groups; `kills` says at how many samples done which workers are killed."""
        pids = {at: [await self.pid(name) for name in names] for at, names in (kills or {}).items()}
        for at, victims in pids.items():
            self.plan[at] = lambda victims=victims: [os.kill(pid, signal.SIGKILL) for pid in victims]
        return await self.runner.run_all([(task, [SAMPLING] * SIZE) for task in self.tasks])

    async def sync(self, version: int) -> None:
        """As the pipeline does it."""
        while True:
            seen = self.supervisor.snapshot()
            try:
                return await self.roles.sync(version)
            except WorkerDied as error:
                await self.supervisor.replace(error, seen)

    async def serves(self, version: int, weights: dict[str, str]) -> None:
        for held_version, held in await self.roles.rollout.all("holds"):
            assert held_version == version and weights.items() <= held.items()


class Loop:
    """One event loop for all tests of the module: callers and locks belong to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __call__(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, LIMIT_S))


@pytest.fixture(scope="module")
def run() -> Loop:
    return Loop()


@pytest.fixture(scope="module")
def stage(run, tmp_path_factory) -> Iterator[Stage]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TrainWorker", Policy)
        patch.setattr(module, "RolloutWorker", Replica)

        async def start() -> Stage:
            stage = Stage(tmp_path_factory.mktemp("logs"))
            await stage.roles.ready()
            return stage

        stage = run(start())
        yield stage
        stage.roles.release()
    ray.shutdown()


@pytest.fixture(scope="module")
def weights(stage, run) -> dict[str, str]:
    """What the replicas serve as version 7: not what they started with."""

    async def main() -> dict[str, str]:
        moved = (await stage.roles.policy.all("perturb", 1))[0]
        await stage.sync(7)
        return moved

    return run(main())


@pytest.fixture(scope="module")
def undisturbed(stage, weights, run) -> list[Group]:
    groups = run(stage.sample())
    assert stage.told == [] and len(groups) == GROUPS
    return groups


def assert_equal(groups: list[Group], others: list[Group], tolerance: float = 0.0) -> None:
    for group, other in zip(groups, others, strict=True):
        assert group.task.id == other.task.id
        for one, two in zip(group.trajectories, other.trajectories, strict=True):
            assert one.usable and two.usable and (one.reward, one.stop_reason) == (two.reward, two.stop_reason)
            assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.versions, two.versions)
            np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["rollout-0", "environment-1", "reward-0"])
def test_one_that_is_killed_is_replaced_and_its_episodes_come_out_the_same(stage, weights, undisturbed, run, name):
    async def main() -> None:
        stage.told.clear()
        before = await stage.pid(name)
        assert_equal(await stage.sample({GROUPS * SIZE // 4: [name]}), undisturbed)
        assert [told.split("`")[1] for told in stage.told] == [name] and "SIGKILL" in stage.told[0]
        assert await stage.pid(name) != before
        await stage.serves(7, weights)
        # The successor is known to everyone: nobody notices a death any more.
        assert_equal(await stage.sample(), undisturbed)
        assert len(stage.told) == 1

    run(main())


@pytest.mark.parametrize(
    "kills",
    [
        {40: ["rollout-0", "environment-0"]},
        {40: ["environment-0", "environment-1", "reward-1"]},
        {1: ["rollout-0", "rollout-1", "environment-0", "environment-1", "reward-0", "reward-1"]},
    ],
)
def test_several_at_once(stage, weights, undisturbed, run, kills):
    async def main() -> None:
        stage.told.clear()
        assert_equal(await stage.sample(kills), undisturbed)
        names = sorted(name for names in kills.values() for name in names)
        assert {told.split("`")[1] for told in stage.told} <= set(names)
        # A reward worker that nobody needed any more is replaced when it is next asked.
        assert_equal(await stage.sample(), undisturbed)
        assert {name for name in names if not name.startswith("reward")} <= {t.split("`")[1] for t in stage.told}
        await stage.serves(7, weights)

    run(main())


def test_a_replica_that_ends_in_a_weight_sync(stage, weights, run):
    async def main() -> None:
        stage.told.clear()
        for version, name in ((8, "rollout-0"), (9, "rollout-1")):
            moved = (await stage.roles.policy.all("perturb", version))[0]
            await stage.kill(name)
            await stage.sync(version)
            await stage.serves(version, moved)
        assert len(stage.told) == 2

    run(main())


def test_a_replica_that_starts_during_a_weight_sync_serves_the_new_weights(stage, weights, run):
    async def main() -> None:
        for version in range(10, 13):
            seen = stage.supervisor.snapshot()
            await stage.kill("rollout-0")
            error = WorkerDied("worker `rollout-0` died", worker="rollout-0")
            replacing = asyncio.create_task(stage.supervisor.replace(error, seen))
            await asyncio.sleep(0.5)
            moved = (await stage.roles.policy.all("perturb", version))[0]
            # Its call waits at the new replica until that has started.
            await asyncio.gather(replacing, stage.sync(version))
            await stage.serves(version, moved)

    run(main())


def test_a_replica_is_taken_out_in_the_middle_and_in_again(stage, weights, run):
    async def main() -> None:
        expected = await stage.sample()
        stage.told.clear()
        moved: list[asyncio.Task] = []
        retire = lambda: moved.append(asyncio.ensure_future(stage.runner.retire(0)))  # noqa: E731
        stage.plan[GROUPS * SIZE // 4] = retire
        groups = await stage.sample()
        await asyncio.gather(*moved)
        # What was under way there goes on elsewhere, from the tokens it has.
        assert_equal(groups, expected, tolerance=1e-5)
        assert stage.router.open == [False, True] and max(await stage.roles.rollout.all("interruptions")) >= 1
        await stage.kill("rollout-0")
        assert_equal(await stage.sample(), expected)
        assert stage.told == []
        stage.told.clear()
        await stage.runner.enlist(0)
        assert_equal(await stage.sample(), expected)
        # Nobody asked it while it was out; now it is replaced.
        assert [told.split("`")[1] for told in stage.told] == ["rollout-0"]
        with pytest.raises(ValueError, match="is the last one"):
            await stage.runner.retire(0)
            await stage.runner.retire(1)
        await stage.runner.enlist(0)

    run(main())


def test_a_policy_that_ends_in_a_weight_sync_is_named(stage, weights, run):
    async def main() -> None:
        await stage.kill("policy-0")
        with pytest.raises(WorkerDied) as caught:
            await stage.sync(13)
        assert caught.value.worker == "policy-0" and "`policy-0` died" in caught.value.message

    run(main())
