"""Weights from the policy to every rollout replica (the paper's ModelUpdateGroup).

    policy ranks ──gather──▶ bucket ──transport──▶ staged by each replica ─ … ─▶ commit: loaded between two tokens

Transports: Ray's object store (on one host that is memory which all processes map), a broadcast (gloo, NCCL), or the
memory of a shared GPU (CUDA IPC). All stage in main memory, so a sync is all or nothing on every replica: what breaks
off half-way leaves the old version serving. A failed call is made again for all, or ends the run: no replica goes on
with other weights than its peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from rollcli.cluster.cluster import Cluster
from rollcli.cluster.weight_sender import BucketFacts
from rollcli.config.schema import SyncConfig
from rollcli.errors import ConfigError, WorkerDied

Transport = Literal["object_store", "broadcast", "cuda_ipc"]
LONGEST_CHAIN = 16
"""Syncs of changes alone after which all is sent again: a replica that starts late has to take in every one."""


class WeightSync:
    """Brings the replicas of one cluster to the weights of another.

    Args:
        policy: the training workers.
        rollout: the replicas.
        config: the recipe's `rollout.sync`.
        transport: how weights travel.

    Attributes:
        version: the version that is served, None before the first sync.
        bytes: that the last sync sent to each replica.
    """

    def __init__(self, policy: Cluster, rollout: Cluster, config: SyncConfig, transport: Transport) -> None:
        self.policy = policy
        self.rollout = rollout
        self.config = config
        self.transport = transport
        self.version: int | None = None
        self.bytes = 0
        self._chain: list[list[tuple[Any, BucketFacts]]] = []
        self._reducible = False
        self._members: list[Any] = []
        self._holders: list[Any] = []

    async def sync(self, version: int) -> None:
        """Brings every replica to the policy's weights, as `version`, unless that is what they have.

        Raises:
            WeightSyncError: names or shapes differ, or a weight did not arrive; the replicas keep their old weights.
            WorkerDied: a worker ended; it is named.
        """
        if version == self.version:
            return
        whole = not self._reducible or len(self._chain) > LONGEST_CHAIN
        # Until all have committed, what was sent last is not what is held.
        self._reducible = False
        replicas = list(self.rollout.workers)
        begun = (self.policy.all("begin_weights", whole), self.rollout.all("begin_weights"))
        await together(*begun)
        if self.transport == "broadcast":
            buckets = await self._broadcast(replicas)
        else:
            lent = self.transport == "cuda_ipc"
            stage = partial(self._all_of, replicas, "stage_lent" if lent else "stage_bucket")
            buckets = await self._hand_over("lend_bucket" if lent else "next_bucket", stage)
        self._holders = []
        await self._all_of(replicas, "commit_weights", version)
        self._holders = replicas
        self.bytes = sum(facts.bytes for _, facts in buckets)
        if self.transport == "object_store":
            on_top = not whole and any(facts.on_top for _, facts in buckets)
            # Of adapters the newest count; changes add up.
            kept = (self._chain if self.config.changed_only else self._chain[:1]) if on_top else []
            self._chain = [*kept, buckets]
        self._reducible, self.version = True, version

    async def bring(self, rank: int) -> None:
        """Brings one replica, which has just started, to the version that is served."""
        if self.version is None:
            return
        replica = self.rollout.workers[rank]

        async def stage(payload: Any, facts: BucketFacts) -> None:
            await self.rollout.gather([replica.stage_bucket.remote(payload, facts)])

        await self.rollout.gather([replica.begin_weights.remote()])
        for payload, facts in (bucket for buckets in self._chain for bucket in buckets):
            await stage(payload, facts)
        if not self._chain and not await self._copied(rank):
            # The policy may be a step ahead by now. What it samples is then newer than its version says, and each
            # token's own log-probability, which the update corrects by, is that of the weights that sampled it.
            self._reducible = False
            await self.policy.all("begin_weights", True)
            await self._hand_over("next_bucket", stage)
        await self.rollout.gather([replica.commit_weights.remote(self.version)])
        self._holders = [*self._alive_holders(), replica]

    async def _copied(self, rank: int) -> bool:
        """Stages on a replica what a peer of it holds; False where there is none that holds what is served."""
        replica = self.rollout.workers[rank]
        for peer in self._alive_holders():
            try:
                await self.rollout.gather([replica.take_copy.remote(peer.held_weights.remote())])
            except WorkerDied as error:
                if error.worker == f"{self.rollout.role}-{rank}":
                    raise
                continue  # the peer died as well, which its own callers notice
            return True
        return False

    def _alive_holders(self) -> list[Any]:
        return [worker for worker in self._holders if worker in self.rollout.workers]

    async def _all_of(self, replicas: list[Any], method: str, *arguments: Any) -> list[Any]:
        """Calls `method` on the replicas that a sync began with.

        Raises:
            WorkerDied: one was replaced meanwhile; its successor lacks what was staged before.
        """
        for rank, (began, now) in enumerate(zip(replicas, self.rollout.workers, strict=True)):
            if began is not now:
                name = f"{self.rollout.role}-{rank}"
                raise WorkerDied(f"worker `{name}` was replaced while weights were on their way to it", worker=name)
        return await self.rollout.all(method, *arguments)

    async def _hand_over(
        self, method: str, stage: Callable[[Any, BucketFacts], Awaitable[Any]]
    ) -> list[tuple[Any, BucketFacts]]:
        """Sends bucket by bucket; only references and facts pass through the driver."""
        buckets: list[tuple[Any, BucketFacts]] = []
        while True:
            calls = self.policy.call_for(2, method)
            # Ranks other than 0 take part in the gathering and return nothing.
            facts = (await self.policy.gather([facts for _, facts in calls]))[0]
            if facts is None:
                return buckets
            await stage(calls[0][0], facts)
            buckets.append((calls[0][0], facts))

    async def _broadcast(self, replicas: list[Any]) -> list[tuple[Any, BucketFacts]]:
        members = [*self.policy.workers[:1], *replicas]
        try:
            if members != self._members:
                host, port = await self.policy.first("address")
                meet = (host, port, len(members))
                joins = [worker.join_weights.remote(*meet, rank) for rank, worker in enumerate(members) if rank]
                await together(self.policy.first("join_weights", *meet, 0), self.rollout.gather(joins))
                self._members = members
            received = self._all_of(replicas, "receive_weights")
            received = (await together(self.policy.all("broadcast_weights"), received))[1]
        except BaseException:
            self._members = []  # what broke off leaves the members out of step
            raise
        return [(None, BucketFacts({}, max(received)))]


async def together(*calls: Any) -> list[Any]:
    """Waits for all calls; of several failures a worker's death is raised, which is what made the others fail.

    Raises:
        Exception: what a call raised.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
    return results


def choose_transport(config: SyncConfig, assignment: Mapping[str, Sequence[int]]) -> Transport:
    """Returns how weights travel between workers on the devices of `assignment`.

    A replica on the very device of the policy's first rank maps its memory; one on another device is sent to by NCCL,
    which cannot serve two members on one device.

    Raises:
        ConfigError: the recipe's own choice cannot work there.
    """
    first, rollout = list(assignment.get("policy", ()))[:1], list(assignment.get("rollout", ()))
    if config.transport == "cuda_ipc" and (not first or rollout != first):
        problem = "needs a single replica, on the GPU of the policy's first process"
    elif config.transport == "broadcast" and len({*first, *rollout}) < len(first) + len(rollout):
        problem = "needs a GPU for every replica that the policy's first process is not on"
    else:
        problem = None
    if problem is not None:
        raise ConfigError(
            f"`rollout.sync.transport: {config.transport}` {problem}; the policy's is on {first or 'no GPU'}, the "
            f"replicas are on {rollout or 'none'}",
            hint="leave it out: `auto` looks where they are",
        )
    if config.transport != "auto":
        return config.transport
    if not first or not rollout:
        return "object_store"
    if rollout == first:
        return "cuda_ipc"
    return "object_store" if first[0] in rollout else "broadcast"
