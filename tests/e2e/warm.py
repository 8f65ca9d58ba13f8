"""Runs that follow each other in the same worker processes, which have imported what is heavy.

A run's start is importing, several times as long as its steps. Everything else is as ever: `launch`, Ray's calls, and
every worker built anew from the recipe of its run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from rollcli.cluster.cluster import Cluster
from rollcli.cluster.reward_worker import RewardWorker
from rollcli.cluster.rollout_worker import RolloutWorker
from rollcli.cluster.train_worker import TrainWorker
from rollcli.cluster.worker import WorkerSpec
from rollcli.config.load import load_recipe
from rollcli.pipelines import launch, replay, roles
from rollcli.pipelines.launch import Outcome
from rollcli.rollout.environment_worker import EnvironmentWorker
from rollcli.runs.directory import RunDirectory

# Ray's processes do not find the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Trainer(TrainWorker):
    def renew(self, spec: WorkerSpec) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
        self.__init__(spec)


class Replica(RolloutWorker):
    def renew(self, spec: WorkerSpec) -> None:
        self.__init__(spec)


class Environments(EnvironmentWorker):
    def renew(self, spec: WorkerSpec) -> None:
        # The heart of the last run goes on beating, which keeps its watchdog from ending the process between runs.
        self.__init__(spec)


class Rewards(RewardWorker):
    def renew(self, spec: WorkerSpec) -> None:
        self.caller.close()
        self.__init__(spec)


IDLE: dict[str, Any] = {}
"""Workers that the last run has left, by name."""


class WarmCluster(Cluster):
    """Takes workers that a run before has left, and leaves its own."""

    def _start(self, spec: WorkerSpec, name: str) -> Any:
        worker = IDLE.pop(name, None)
        if worker is None:
            return super()._start(spec, name)
        # Calls of an actor are carried out in order: whatever comes after finds the new worker.
        worker.renew.remote(spec)
        return worker

    def kill(self) -> None:
        IDLE.update({f"{self.role}-{rank}": worker for rank, worker in enumerate(self.workers)})


@contextlib.contextmanager
def warm_workers() -> Iterator[str]:
    """Makes runs and replays of this process share a Ray, whose address it yields, and their workers."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, replay):
            patch.setattr(module, "ray_session", lambda *_: contextlib.nullcontext())
        patch.setattr(roles, "Cluster", WarmCluster)
        for worker in (Trainer, Replica, Environments, Rewards):
            patch.setattr(roles, worker.__base__.__name__, worker)
        yield ray.get_runtime_context().gcs_address
    IDLE.clear()
    ray.shutdown()


def run_here(runs: Path, recipe: Path | str, name: str, *overrides: str, smoke: bool = False) -> Outcome:
    """Runs a recipe in this process, as `roll train` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLL_RUNS", str(runs))
        return launch.launch(load_recipe(str(recipe), list(overrides), smoke), RunDirectory.create("run", name))
