"""After a sync the replicas hold the policy's weights, bit by bit; or their old ones, and an error is raised."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from itertools import count
from typing import Any

import pytest
from ray import cloudpickle

from rollcli.cluster.cluster import Cluster, worker_specs
from rollcli.cluster.placement import ResourcePool
from rollcli.cluster.rollout_worker import RolloutWorker
from rollcli.cluster.train_worker import TrainWorker
from rollcli.cluster.weight_sender import BucketFacts
from rollcli.cluster.weights import WeightSync, choose_transport
from rollcli.config.schema import SyncConfig
from rollcli.errors import ConfigError, WeightSyncError, WorkerDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LIMIT_S = 120
GENERATIONS = count(1)


def digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


class Policy(TrainWorker):
    """The real worker, with weights that can be moved and seen."""

    def perturb(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.add_(torch.randn(local.shape, generator=generator), alpha=0.01)

    def set_sync(self, config: SyncConfig) -> None:
        self.sender.config = config

    def touch(self, elements: int) -> None:
        """Changes so many elements of one matrix."""
        import torch

        with torch.no_grad():
            parameter = max(self.engine.model.parameters(), key=lambda p: p.numel())
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.view(-1)[:elements] += 0.5

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.engine.named_weights().items()}

    def spoil(self, how: str) -> None:
        whole, real = self.engine.named_weights(), self.engine.weight_buckets
        name = next(iter(whole))
        if how == "missing":
            del whole[name]
        elif how == "unknown":
            whole["_fsdp_wrapped_module.x"] = whole[name]
        else:
            whole[name] = whole[name][1:]
        self.engine.weight_buckets = lambda size, adapters_only: iter([whole])
        self.mend = lambda: setattr(self.engine, "weight_buckets", real)

    def restore(self) -> None:
        self.mend()


class Replica(RolloutWorker):
    """The real worker, with weights that can be seen."""

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.engine.model.state_dict().items()}

    def version(self) -> int:
        return self.engine.version


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


SETTINGS = {
    "store": (SyncConfig(verify=True, bucket_mib=1), "object_store"),
    "changes": (SyncConfig(changed_only=True, bucket_mib=1), "object_store"),
    "broadcast": (SyncConfig(transport="broadcast", bucket_mib=1, verify=True), "broadcast"),
}


@pytest.fixture(scope="module")
def clusters(ray, values) -> tuple[Cluster, Cluster]:
    """One policy and two replicas, all real."""
    pool = ResourcePool({})
    policy = Cluster(Policy, worker_specs("policy", 1, 1, values, None, None), pool)
    rollout = Cluster(Replica, worker_specs("rollout", 2, 1, values, None, None), pool, max_concurrency=100)

    async def ready() -> None:
        await asyncio.gather(policy.ready(), rollout.ready())
        await policy.all("connect", *await policy.first("address"))

    run(ready())
    return policy, rollout


@pytest.fixture(scope="module", params=SETTINGS)
def sync(clusters, request) -> WeightSync:
    policy, rollout = clusters
    config, transport = SETTINGS[request.param]
    run(policy.all("set_sync", config))
    return WeightSync(policy, rollout, config, transport)


async def equal(sync: WeightSync) -> dict[str, str]:
    """Checks that every replica holds the policy's weights; returns their digests."""
    expected = await sync.policy.first("digests")
    for held in await sync.rollout.all("digests"):
        assert expected.items() <= held.items()
        # What the replica has beyond the policy's names shares a tensor with one of them (tied embeddings).
        assert set(held.values()) == set(expected.values())
    assert await sync.rollout.all("version") == [sync.version] * len(sync.rollout)
    return expected


def test_every_tensor_is_equal_after_each_of_twenty_syncs(sync):
    async def main() -> None:
        seen = set()
        for version in range(1, 21):
            await sync.policy.all("perturb", version)
            await sync.sync(version)
            seen.add(tuple((await equal(sync)).values()))
        assert len(seen) == 20

    run(main())


def test_the_version_that_is_served_is_not_sent_again(sync):
    async def main() -> None:
        await sync.policy.all("perturb", 1)
        await sync.sync(30)
        before = await sync.policy.first("digests")
        await sync.policy.all("perturb", 2)
        await sync.sync(30)
        assert all(before.items() <= held.items() for held in await sync.rollout.all("digests"))

    run(main())


def test_a_few_changed_elements_are_sent_by_themselves(sync):
    async def main() -> None:
        await sync.policy.all("perturb", 5)
        await sync.sync(40)
        everything = sync.bytes
        await sync.policy.all("touch", 7)
        await sync.sync(41)
        await equal(sync)
        few = sync.config.changed_only
        assert sync.bytes == (7 * 8 if few else everything) and everything > 10**6

    run(main())


@pytest.mark.parametrize("how", ["missing", "unknown", "of another shape"])
def test_disagreement_is_an_error_and_the_old_weights_stay(sync, how):
    async def main() -> None:
        await sync.policy.all("perturb", 98)
        await sync.sync(50)
        before = await sync.rollout.all("digests")
        await sync.policy.all("perturb", 99)
        await sync.policy.all("spoil", how)
        with pytest.raises(WeightSyncError, match=f"weights {how}.*the old weights stay"):
            await sync.sync(51)
        await sync.policy.all("restore")
        assert await sync.rollout.all("digests") == before and await sync.rollout.all("version") == [50, 50]
        await sync.sync(52)
        await equal(sync)

    run(main())


def test_a_replica_that_starts_late_gets_what_is_served_though_the_policy_has_moved_on(sync):
    async def main() -> None:
        for version in (60, 61):
            await sync.policy.all("perturb", version)
            await sync.sync(version)
        served = await equal(sync)
        await sync.policy.all("perturb", 62)
        await sync.rollout.respawn(1, generation=next(GENERATIONS))
        await sync.bring(1)
        assert all(served.items() <= held.items() for held in await sync.rollout.all("digests"))
        assert await sync.rollout.all("version") == [61, 61]
        await sync.sync(62)
        await equal(sync)

    run(main())


class Source:
    """A policy rank whose weights are on rank 0, and that can die."""

    def __init__(self, spec: Any) -> None:
        self.spec, self.left = spec, 1

    def ready(self) -> None: ...

    def begin_weights(self, whole: bool) -> None: ...

    def refill(self) -> None:
        self.left = 1

    def next_bucket(self) -> tuple:
        import os

        import torch

        from rollcli.cluster.payload import packed

        if self.spec.role == "dying" and self.spec.rank == self.spec.threads:
            os._exit(1)
        if not self.left:
            return None, None
        self.left -= 1
        whole = None if self.spec.rank else {"x": packed(torch.arange(9).to(torch.bfloat16) / 7)}
        return whole, BucketFacts({}, 18)


class Sink:
    """A replica that says what came."""

    def __init__(self, spec: Any) -> None:
        self.got: tuple | None = None

    def ready(self) -> None: ...

    def begin_weights(self) -> None: ...

    def stage_bucket(self, entries: dict, facts: BucketFacts) -> None:
        from rollcli.cluster.payload import unpacked

        tensor = unpacked(entries["x"])
        self.got = str(tensor.dtype), tensor.float().tolist()

    def commit_weights(self, version: int) -> None:
        self.got = (*self.got, version)

    def seen(self) -> tuple | None:
        return self.got


def between(source: Cluster, sink: Cluster) -> WeightSync:
    return WeightSync(source, sink, SyncConfig(), "object_store")


def test_bfloat16_travels_bit_by_bit_and_other_ranks_take_part(ray):
    import torch

    source = Cluster(Source, worker_specs("source", 2, 1, {}, None, None), ResourcePool({}))
    sink = Cluster(Sink, worker_specs("sink", 1, 1, {}, None, None), ResourcePool({}))
    run(between(source, sink).sync(3))
    assert run(sink.first("seen")) == ("torch.bfloat16", (torch.arange(9).to(torch.bfloat16) / 7).float().tolist(), 3)


@pytest.mark.parametrize(("ranks", "dies"), [(2, 1), (2, 0), (1, 0)])
def test_a_policy_rank_that_dies_is_named(ray, ranks, dies):
    # `threads` says which rank dies; the names of Ray's actors must be free.
    specs = worker_specs("dying", ranks, dies, {}, None, None)
    source = Cluster(Source, specs, ResourcePool({}))
    sink = Cluster(Sink, worker_specs("sink2", 1, 1, {}, None, None), ResourcePool({}))
    with pytest.raises(WorkerDied, match=f"`dying-{dies}` died") as caught:
        run(between(source, sink).sync(3))
    assert caught.value.worker == f"dying-{dies}"
    source.kill()
    sink.kill()


def test_a_replica_that_dies_is_named(ray):
    source = Cluster(Source, worker_specs("source3", 1, 1, {}, None, None), ResourcePool({}))
    sink = Cluster(Sink, worker_specs("sink3", 2, 1, {}, None, None), ResourcePool({}))
    run(sink.all("seen"))
    ray.kill(sink.workers[1])
    with pytest.raises(WorkerDied) as caught:
        run(between(source, sink).sync(3))
    assert caught.value.worker == "sink3-1"


def test_a_replica_that_is_replaced_on_the_way_is_named_and_nothing_is_committed(ray, monkeypatch):
    source = Cluster(Source, worker_specs("source4", 1, 1, {}, None, None), ResourcePool({}))
    sink = Cluster(Sink, worker_specs("sink4", 1, 1, {}, None, None), ResourcePool({}))
    other = Cluster(Sink, worker_specs("sink5", 1, 1, {}, None, None), ResourcePool({}))
    ask = sink.all

    async def replacing(method: str, *arguments: Any) -> list[Any]:
        answers = await ask(method, *arguments)
        if method == "stage_bucket":
            sink.workers[:] = other.workers
        return answers

    monkeypatch.setattr(sink, "all", replacing)
    with pytest.raises(WorkerDied, match="`sink4-0` was replaced") as caught:
        run(between(source, sink).sync(3))
    assert caught.value.worker == "sink4-0" and run(other.first("seen")) is None


class Copier(Sink):
    """A replica that can be copied."""

    def take_copy(self, held: tuple) -> None:
        self.got = held[:2]

    def held_weights(self) -> tuple:
        return self.got


def test_a_late_replica_copies_a_peer_that_lives_or_else_the_policy_whatever_else_has_died(ray):
    source = Cluster(Source, worker_specs("source6", 1, 1, {}, None, None), ResourcePool({}))
    sink = Cluster(Copier, worker_specs("sink6", 3, 1, {}, None, None), ResourcePool({}))
    sync = between(source, sink)

    async def main() -> None:
        await sync.sync(3)
        served = await sink.first("seen")
        sync._chain = []  # as with a transport that leaves nothing behind
        for rank in (0, 2):
            ray.kill(sink.workers[rank])
        await sink.respawn(2, 1)
        await sync.bring(2)
        assert await sink.gather([sink.workers[2].seen.remote()]) == [served]
        ray.kill(sink.workers[1])
        ray.kill(sink.workers[2])
        await sink.respawn(1, 2)
        await source.gather([source.workers[0].refill.remote()])
        await sync.bring(1)
        assert await sink.gather([sink.workers[1].seen.remote()]) == [served] and sync.version == 3

    run(main())


def test_what_was_sent_is_kept_only_as_far_as_a_late_replica_needs_it(ray):
    source = Cluster(Source, worker_specs("source7", 1, 1, {}, None, None), ResourcePool({}))
    sink = Cluster(Sink, worker_specs("sink7", 1, 1, {}, None, None), ResourcePool({}))
    sync = between(source, sink)

    async def main() -> None:
        for version in range(4):
            await source.all("refill")
            await sync.sync(version)
            assert len(sync._chain) == 1

    run(main())


@pytest.mark.parametrize(
    ("assignment", "transport"),
    [
        ({}, "object_store"),
        ({"policy": [0], "rollout": [0]}, "cuda_ipc"),
        ({"policy": [0, 1], "rollout": [0, 1]}, "object_store"),
        ({"policy": [0, 1], "rollout": [2, 3]}, "broadcast"),
        ({"policy": [0, 1], "rollout": [1, 2]}, "broadcast"),
    ],
)
def test_the_transport_follows_from_where_the_workers_are(assignment, transport):
    assert choose_transport(SyncConfig(), assignment) == transport
    assert choose_transport(SyncConfig(transport="object_store"), assignment) == "object_store"


@pytest.mark.parametrize(
    ("transport", "assignment"),
    [
        ("cuda_ipc", {}),
        ("cuda_ipc", {"policy": [0], "rollout": [0, 1]}),
        ("cuda_ipc", {"policy": [0], "rollout": [1]}),
        ("broadcast", {"policy": [0], "rollout": [0]}),
        ("broadcast", {"policy": [0], "rollout": [1, 1]}),
    ],
)
def test_a_transport_that_cannot_work_where_the_workers_are_is_refused(transport, assignment):
    with pytest.raises(ConfigError, match=f"`rollout.sync.transport: {transport}` needs"):
        choose_transport(SyncConfig(transport=transport), assignment)
    assert choose_transport(SyncConfig(transport="broadcast"), {}) == "broadcast"
