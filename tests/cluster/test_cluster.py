"""Workers of one role: shards and gathers, errors as they were raised, deaths by name."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle

from rollcli.cluster import cluster as module
from rollcli.cluster.cluster import Cluster, worker_specs
from rollcli.cluster.placement import ResourcePool
from rollcli.data.batch import Batch
from rollcli.errors import ConfigError, EngineError, ModelNotFound, Problem, WeightSyncError, WorkerDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LIMIT_S = 60


class Member:
    """A worker without a recipe."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.seen: list[int] = []

    def ready(self) -> dict:
        return {"name": self.spec.name, "pid": os.getpid()}

    def column(self, batch: Batch, factor: float) -> np.ndarray:
        self.seen = batch.samples["reward"].tolist()
        return batch.tokens["ids"].astype(np.float32) * np.float32(factor)

    def samples(self) -> list:
        return self.seen

    def fail(self, error: Exception) -> None:
        raise error

    def fail_or_die(self, die: bool) -> None:
        time.sleep(0.5 if die else 0)
        if die:
            os._exit(1)
        raise RuntimeError("connection closed by peer")

    def echo(self, value: int) -> int:
        return value + self.spec.rank


class Unborn(Member):
    """Cannot start on rank 1."""

    def __init__(self, spec: Any) -> None:
        if spec.rank == 1:
            raise ModelNotFound("no model `x`", hint="look again")
        super().__init__(spec)


class Slow(Member):
    """Never ready."""

    def ready(self) -> None:
        time.sleep(600)


def start(count: int, worker: type = Member, role: str = "policy") -> Cluster:
    return Cluster(worker, worker_specs(role, count, 1, {}, None, None), ResourcePool({}))


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


@pytest.fixture(scope="module")
def clusters(ray) -> dict[int, Cluster]:
    return {count: start(count, role=f"policy{count}") for count in (1, 2, 3)}


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Nine samples of 1 to 9 tokens, not in order of length; token ids are unique."""
    lengths = [4, 9, 1, 6, 2, 8, 3, 7, 5]
    return Batch(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        {"ids": np.arange(45, dtype=np.int32), "loss_mask": np.ones(45, dtype=bool)},
        {"reward": np.arange(9, dtype=np.float64)},
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_column_of_nine_samples_comes_back_in_batch_order(clusters, batch, count):
    cluster = clusters[count]
    column = run(cluster.columns("column", batch, 0.5))
    assert column.dtype == np.float32 and column.tolist() == [n / 2 for n in range(45)]
    seen = run(cluster.all("samples"))
    assert sorted(reward for part in seen for reward in part) == list(range(9)) and all(seen)


def test_a_sample_without_a_trained_token_is_not_computed(clusters, batch):
    batch = batch.select(np.arange(9))
    batch.tokens["loss_mask"][4:13] = False
    column = run(clusters[2].columns("column", batch, 1.0))
    assert column.tolist() == [0 if 4 <= n < 13 else n for n in range(45)]
    assert sorted(reward for part in run(clusters[2].all("samples")) for reward in part) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_more_workers_than_samples(clusters, batch):
    few = batch.select(np.array([1, 2]))
    assert run(clusters[3].columns("column", few, 1.0)).tolist() == few.tokens["ids"].tolist()


def test_each_first_and_names(clusters):
    assert run(clusters[3].each("echo", [(10,), (20,), (30,)])) == [10, 21, 32]
    assert run(clusters[3].all("echo", 1)) == [1, 2, 3]
    assert run(clusters[3].first("echo", 5)) == 5
    assert [facts["name"] for facts in run(clusters[2].ready())] == ["policy2-0", "policy2-1"]
    with pytest.raises(ValueError):
        run(clusters[3].each("echo", [(1,)]))


@pytest.mark.parametrize(
    "error",
    [
        EngineError("no memory", hint="use less"),
        WeightSyncError("names differ"),
        ConfigError([Problem("wrong", "a.yaml", 3, 4)], hint="mend it"),
    ],
)
def test_worker_error_arrives_as_its_own_class(clusters, error):
    with pytest.raises(type(error)) as caught:
        run(clusters[2].all("fail", error))
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)


def test_foreign_error_arrives_as_an_instance_of_its_class(clusters):
    with pytest.raises(OSError, match="No space left"):
        run(clusters[1].all("fail", OSError(28, "No space left on device")))


def test_the_one_that_died_is_named_not_the_one_that_noticed(ray):
    cluster = start(2, role="reference")
    run(cluster.ready())
    with pytest.raises(WorkerDied, match="`reference-1` died"):
        run(cluster.each("fail_or_die", [(False,), (True,)]))


def test_failed_start_is_told_at_once_with_its_reason(ray):
    with pytest.raises(WorkerDied, match=r"`unborn-1` did not start: ModelNotFound: no model `x`"):
        run(start(3, Unborn, role="unborn").ready())


def test_start_that_takes_for_ever_ends(ray, monkeypatch):
    monkeypatch.setattr(module, "START_LIMIT_S", 0.5)
    with pytest.raises(WorkerDied, match="slow workers have not started"):
        run(start(1, Slow, role="slow").ready())


def test_killed_workers_are_gone(ray):
    cluster = start(2, role="killed")
    pids = [facts["pid"] for facts in run(cluster.ready())]
    cluster.kill()
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_another_takes_the_place_of_one_that_is_dead_or_not(ray, monkeypatch):
    cluster = start(2, role="succeeded")
    before = [facts["pid"] for facts in run(cluster.ready())]
    old = cluster.workers[1]
    run(cluster.respawn(1, 1))
    os.kill(run(cluster.ready())[1]["pid"], 9)
    run(cluster.respawn(1, 2))
    after = run(cluster.ready())
    assert [facts["name"] for facts in after] == ["succeeded-0", "succeeded-1"]
    assert after[0]["pid"] == before[0] and after[1]["pid"] != before[1] and not os.path.exists(f"/proc/{before[1]}")
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(old.ready.remote())
    monkeypatch.setattr(module, "START_LIMIT_S", 0.5)
    cluster._remote = ray.remote(Slow)
    with pytest.raises(WorkerDied, match="a new `succeeded-0` has not started within 0 s"):
        run(cluster.respawn(0, 3))


def test_specs():
    specs = worker_specs("rollout", 2, 3, {"a": 1}, "/f", "/l")
    assert [(s.name, s.rank, s.count, s.threads, s.folder, s.logs) for s in specs] == [
        ("rollout-0", 0, 2, 3, "/f", "/l"), ("rollout-1", 1, 2, 3, "/f", "/l"),
    ]  # fmt: skip
