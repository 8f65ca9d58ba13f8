"""The workers of one role, called together: a batch is sharded over them and gathered again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from rollcli.cluster.death import understood
from rollcli.cluster.placement import ResourcePool
from rollcli.cluster.worker import WorkerSpec
from rollcli.data.batch import Batch
from rollcli.errors import WorkerDied

START_LIMIT_S = 600.0
DEATH_S = 3.0
"""How long after a failure the other workers are heard: one that dies makes its peers fail, perhaps earlier."""


class Cluster:
    """Workers of one role; constructing it starts them, `ready` waits for them.

    Args:
        worker: class of the workers.
        specs: what each is told, by rank.
        pool: where they go.
        peers: consecutive workers that share one copy of a model: they get the same part of a batch and return the
            same.
        options: Ray's, for each.
    """

    def __init__(
        self, worker: type, specs: list[WorkerSpec], pool: ResourcePool, peers: int = 1, **options: Any
    ) -> None:
        self.role = specs[0].role
        self.peers = peers
        self._specs, self._pool, self._options = specs, pool, options
        self._remote = ray.remote(worker)
        self.workers = [self._start(spec, spec.name) for spec in specs]

    def _start(self, spec: WorkerSpec, name: str) -> Any:
        placed = self._pool.options(spec.role, spec.rank)
        return self._remote.options(name=name, **placed, **self._options).remote(spec)

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def data_ranks(self) -> int:
        """Parts that a batch is split into."""
        return len(self.workers) // self.peers

    async def ready(self) -> list[dict[str, Any]]:
        """Waits until every worker has started; returns what they say of themselves.

        Raises:
            WorkerDied: one did not start.
        """
        try:
            return await asyncio.wait_for(self.all("ready"), START_LIMIT_S)
        except TimeoutError as error:
            raise WorkerDied(
                f"the {self.role} workers have not started within {START_LIMIT_S:.0f} s",
                hint="see their logs in the run's `logs/latest/`",
            ) from error

    async def respawn(self, rank: int, generation: int) -> None:
        """Ends worker `rank`, whatever state it is in, and starts another in its place.

        Raises:
            WorkerDied: it does not start.
        """
        ray.kill(self.workers[rank])
        # Ray may take a while to see that the old one's name is free.
        self.workers[rank] = self._start(self._specs[rank], f"{self._specs[rank].name}.{generation}")
        try:
            await asyncio.wait_for(self.gather([self.workers[rank].ready.remote()]), START_LIMIT_S)
        except TimeoutError as error:
            raise WorkerDied(
                f"a new `{self._specs[rank].name}` has not started within {START_LIMIT_S:.0f} s",
                hint="see its log in the run's `logs/latest/`",
            ) from error

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls `method` on every worker and returns references to the results, which `gather` waits for."""
        return [getattr(worker, method).remote(*arguments) for worker in self.workers]

    def call_for(self, results: int, method: str, *arguments: Any) -> list[list[Any]]:
        """As `call`, for a method that returns so many results: a reference to each, for every worker."""
        return [getattr(worker, method).options(num_returns=results).remote(*arguments) for worker in self.workers]

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls `method` on every worker and returns all results; a failure is raised, with its cause."""
        return await self.gather(self.call(method, *arguments))

    async def each(self, method: str, arguments: list[tuple]) -> list[Any]:
        """Calls `method` with arguments of each data rank's own; returns what the first of each rank's peers did."""
        given = [arguments[rank // self.peers] for rank in range(len(arguments) * self.peers)]
        pairs = zip(self.workers, given, strict=True)
        results = await self.gather([getattr(worker, method).remote(*mine) for worker, mine in pairs])
        return results[:: self.peers]

    async def first(self, method: str, *arguments: Any) -> Any:
        """Calls `method` on the first worker."""
        return (await self.gather([getattr(self.workers[0], method).remote(*arguments)]))[0]

    async def columns(self, method: str, batch: Batch, *arguments: Any) -> np.ndarray:
        """Shards `batch` over the workers and returns the token column they compute, `[T]`, in batch order.

        Trajectories without a trained token are not computed; their values are 0.
        """
        trained = np.flatnonzero(batch.trained_lengths)
        shards = [trained[shard] for shard in batch.select(trained).shards(self.data_ranks)]
        parts = await self.each(method, [(batch.select(shard), *arguments) for shard in shards])
        return batch.gather(shards, parts)

    async def gather(self, references: list[Any]) -> list[Any]:
        """Returns the results of calls.

        Raises:
            WorkerDied: a worker ended.
            Exception: what a worker raised, as it was raised there.
        """
        # As they are now: while this waits, one that ended may be replaced, and the error must name it all the same.
        workers = {f"{self.role}-{rank}": worker for rank, worker in enumerate(self.workers)}
        calls = [asyncio.ensure_future(reference) for reference in references]
        try:
            if calls:
                _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
                if waiting:
                    await asyncio.wait(waiting, timeout=DEATH_S)
        finally:
            for call in calls:
                call.cancel()
        ended = [call for call in calls if call.done() and not call.cancelled()]
        errors = [understood(call.exception(), workers) for call in ended if call.exception()]
        if errors:
            raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
        return [call.result() for call in calls]

    def kill(self) -> None:
        """Ends the workers at once."""
        for worker in self.workers:
            ray.kill(worker)


def worker_specs(
    role: str, count: int, threads: int, values: Mapping[str, Any], folder: str | None, logs: str | None
) -> list[WorkerSpec]:
    """Returns the specifications of a role's workers."""
    return [WorkerSpec(role, rank, count, threads, values, folder, logs) for rank in range(count)]
