"""Devices in Ray's books: distinct, shared, too many, given back. No GPU is touched."""

from __future__ import annotations

import sys
import time

import pytest
from ray import cloudpickle

from rollcli.cluster import placement as module
from rollcli.cluster.placement import ResourcePool
from rollcli.errors import PlanError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Holder:
    """Says which GPU Ray gave it."""

    def device(self) -> list[str]:
        import ray

        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


@pytest.fixture
def devices(ray):
    """Starts a worker for every place of a pool and returns role → device of each rank."""
    pools, actors = [], []

    def place(assignment: dict[str, list[int]], counts: dict[str, int] | None = None) -> dict[str, list[str]]:
        pool = ResourcePool(assignment)
        pools.append(pool)
        started = {
            role: [ray.remote(Holder).options(**pool.options(role, rank)).remote() for rank in range(len(held))]
            for role, held in assignment.items()
        }
        actors.extend(actor for members in started.values() for actor in members)
        return {
            role: [device for actor in members for device in ray.get(actor.device.remote(), timeout=60)]
            for role, members in started.items()
        }

    yield place
    for actor in actors:
        ray.kill(actor)
    for pool in pools:
        pool.release()
    free(ray, 8)


def free(ray, count: int) -> None:
    """Waits until so many GPUs are free."""
    deadline = time.monotonic() + 30
    while ray.available_resources().get("GPU", 0) < count:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)


def test_split_roles_get_distinct_devices(devices):
    placed = devices({"policy": [0, 1, 2, 3], "rollout": [4, 5, 6, 7]})
    assert len(placed["policy"]) == len(placed["rollout"]) == 4
    assert len({*placed["policy"], *placed["rollout"]}) == 8


def test_colocated_roles_share(devices):
    placed = devices({"policy": [0, 1], "rollout": [0, 1], "reference": [0, 1]})
    assert placed["policy"] == placed["rollout"] == placed["reference"]
    assert len(set(placed["policy"])) == 2


def test_overlapping_roles_share_where_they_overlap(devices):
    placed = devices({"policy": [0, 1, 2, 3], "rollout": [2, 3, 4]})
    assert placed["policy"][2:] == placed["rollout"][:2]
    assert len({*placed["policy"], *placed["rollout"]}) == 5


def test_several_workers_on_one_device(devices):
    placed = devices({"policy": [0], "rollout": [1, 1]})
    assert placed["rollout"][0] == placed["rollout"][1] != placed["policy"][0]


def test_more_than_there_are_is_an_error_not_a_hang(ray):
    with pytest.raises(PlanError, match="asks for 9 GPUs, the cluster has 8") as caught:
        ResourcePool({"policy": list(range(9))})
    assert "roll devices plan" in caught.value.hint


def test_held_by_others_is_an_error_and_release_frees(ray, monkeypatch):
    monkeypatch.setattr(module, "RESERVE_LIMIT_S", 1.0)
    first = ResourcePool({"policy": list(range(6))})
    with pytest.raises(PlanError, match="4 GPUs did not come free in 1 s: 8 in the cluster, 2 free now"):
        ResourcePool({"policy": list(range(4))})
    first.release()
    first.release()
    free(ray, 8)
    ResourcePool({"policy": list(range(8))}).release()
    free(ray, 8)


def test_without_devices_nothing_is_reserved(ray):
    pool = ResourcePool({})
    assert pool.options("policy", 0) == {"num_cpus": 0, "num_gpus": 0}
    pool.release()
    assert ResourcePool({"policy": []}).options("policy", 0)["num_gpus"] == 0


class Seeing:
    """Says which GPUs a process sees."""

    def devices(self) -> str:
        import os

        return os.environ["CUDA_VISIBLE_DEVICES"]


def test_a_worker_that_spreads_sees_its_own_devices_and_reserves_nothing(ray):
    pool = ResourcePool({"policy": [0], "rollout": [1, 2, 0, 3]}, {"rollout": 2})
    actors = [ray.remote(Seeing).options(**pool.options("rollout", rank)).remote() for rank in range(2)]
    policy = ray.remote(Holder).options(**pool.options("policy", 0)).remote()
    seen = [ray.get(actor.devices.remote(), timeout=60).split(",") for actor in actors]
    assert [len(each) for each in seen] == [2, 2] and len({*seen[0], *seen[1]}) == 4
    assert ray.get(policy.device.remote(), timeout=60) == [seen[1][0]]
    for actor in (*actors, policy):
        ray.kill(actor)
    pool.release()
    free(ray, 8)
