"""After a sync the replicas hold the policy's weights, bit by bit; or their old ones, and an error is raised."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from typing import Any

import pytest
from ray import cloudpickle

from rollcli.cluster.cluster import Cluster, worker_specs
from rollcli.cluster.placement import ResourcePool
from rollcli.cluster.rollout_worker import RolloutWorker
from rollcli.cluster.train_worker import TrainWorker, to_numpy
from rollcli.cluster.weights import sync_weights
from rollcli.errors import WeightSyncError, WorkerDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LIMIT_S = 120


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

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.engine.named_weights().items()}

    def spoil(self, how: str) -> None:
        whole, real = self.engine.named_weights(), self.engine.named_weights
        name = next(iter(whole))
        if how == "missing":
            del whole[name]
        elif how == "unknown":
            whole["_fsdp_wrapped_module.x"] = whole[name]
        else:
            whole[name] = whole[name][1:]
        self.engine.named_weights = lambda: whole
        self.mend = lambda: setattr(self.engine, "named_weights", real)

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


@pytest.fixture(scope="module")
def roles(ray, values) -> tuple[Cluster, Cluster]:
    pool = ResourcePool({})
    policy = Cluster(Policy, worker_specs("policy", 1, 1, values, None, None), pool)
    rollout = Cluster(Replica, worker_specs("rollout", 2, 1, values, None, None), pool, max_concurrency=100)

    async def ready() -> None:
        await asyncio.gather(policy.ready(), rollout.ready())
        await policy.all("connect", *await policy.first("address"))

    run(ready())
    return policy, rollout


def test_every_tensor_is_equal_after_each_of_twenty_syncs(roles):
    policy, rollout = roles

    async def main() -> None:
        seen = set()
        for version in range(1, 21):
            await policy.all("perturb", version)
            await sync_weights(policy, rollout, version)
            expected = await policy.first("digests")
            for held in await rollout.all("digests"):
                assert expected.items() <= held.items()
                # What the replica has beyond the policy's names shares a tensor with one of them (tied embeddings).
                assert set(held.values()) == set(expected.values())
            seen.add(tuple(expected.values()))
        assert await rollout.all("version") == [20, 20] and len(seen) == 20

    run(main())


@pytest.mark.parametrize("how", ["missing", "unknown", "of another shape"])
def test_disagreement_is_an_error_and_the_old_weights_stay(roles, how):
    policy, rollout = roles

    async def main() -> None:
        await sync_weights(policy, rollout, 50)
        before = await rollout.all("digests")
        await policy.all("perturb", 99)
        await policy.all("spoil", how)
        with pytest.raises(WeightSyncError, match=f"weights {how}.*the old weights stay"):
            await sync_weights(policy, rollout, 51)
        await policy.all("restore")
        assert await rollout.all("digests") == before and await rollout.all("version") == [50, 50]
        await sync_weights(policy, rollout, 52)
        assert (await policy.first("digests")).items() <= (await rollout.all("digests"))[0].items()

    run(main())


class Source:
    """A policy rank whose weights are bfloat16 on rank 0, and that can die."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def ready(self) -> None: ...

    def weights(self) -> dict | None:
        import os

        import torch

        if self.spec.role == "dying" and self.spec.rank == self.spec.threads:
            os._exit(1)
        return None if self.spec.rank else {"x": to_numpy(torch.arange(9).to(torch.bfloat16) / 7)}


class Sink:
    """A replica that says what came."""

    def __init__(self, spec: Any) -> None:
        self.got: tuple | None = None

    def load_weights(self, weights: dict, version: int) -> None:
        from rollcli.cluster.train_worker import to_tensors

        tensor = to_tensors(weights)["x"]
        self.got = str(tensor.dtype), tensor.float().tolist(), version

    def seen(self) -> tuple | None:
        return self.got


def test_bfloat16_travels_bit_by_bit_and_other_ranks_take_part(ray):
    import torch

    source = Cluster(Source, worker_specs("source", 2, 1, {}, None, None), ResourcePool({}))
    sink = Cluster(Sink, worker_specs("sink", 1, 1, {}, None, None), ResourcePool({}))
    run(sync_weights(source, sink, 3))
    assert run(sink.first("seen")) == ("torch.bfloat16", (torch.arange(9).to(torch.bfloat16) / 7).float().tolist(), 3)


@pytest.mark.parametrize(("ranks", "dies"), [(2, 1), (2, 0), (1, 0)])
def test_a_policy_rank_that_dies_is_named(ray, ranks, dies):
    # `threads` says which rank dies; the names of Ray's actors must be free.
    specs = worker_specs("dying", ranks, dies, {}, None, None)
    source = Cluster(Source, specs, ResourcePool({}))
    sink = Cluster(Sink, worker_specs("sink2", 1, 1, {}, None, None), ResourcePool({}))
    with pytest.raises(WorkerDied, match=f"`dying-{dies}` died") as caught:
        run(sync_weights(source, sink, 3))
    assert caught.value.worker == f"dying-{dies}"
    source.kill()
    sink.kill()


def test_a_replica_that_dies_is_named(ray):
    source = Cluster(Source, worker_specs("source3", 1, 1, {}, None, None), ResourcePool({}))
    sink = Cluster(Sink, worker_specs("sink3", 2, 1, {}, None, None), ResourcePool({}))
    run(sink.all("seen"))
    ray.kill(sink.workers[1])
    with pytest.raises(WorkerDied) as caught:
        run(sync_weights(source, sink, 3))
    assert caught.value.worker == "sink3-1"
