"""The workers of one role, called together: a batch is sharded over them and gathered again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from rollcli.cluster.placement import ResourcePool
from rollcli.cluster.worker import WorkerSpec
from rollcli.data.batch import Batch
from rollcli.errors import RollError, WorkerDied

START_LIMIT_S = 600.0


class Cluster:
    """Workers of one role; constructing it starts them, `ready` waits for them."""

    def __init__(self, worker: type, specs: list[WorkerSpec], pool: ResourcePool, **options: Any) -> None:
        self.role = specs[0].role
        remote = ray.remote(worker)
        self.workers = [
            remote.options(name=spec.name, **pool.options(spec.role, spec.rank), **options).remote(spec)
            for spec in specs
        ]

    def __len__(self) -> int:
        return len(self.workers)

    async def ready(self) -> list[dict[str, Any]]:
        """Waits until every worker has started; returns what they say of themselves."""
        return await asyncio.wait_for(self.all("ready"), START_LIMIT_S)

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls `method` on every worker and returns all results; the first failure is raised, with its cause."""
        return await self._gather([getattr(w, method).remote(*arguments) for w in self.workers])

    async def each(self, method: str, arguments: list[tuple]) -> list[Any]:
        """Calls `method` on every worker with arguments of its own."""
        pairs = zip(self.workers, arguments, strict=True)
        return await self._gather([getattr(worker, method).remote(*given) for worker, given in pairs])

    async def columns(self, method: str, batch: Batch, *arguments: Any) -> np.ndarray:
        """Shards `batch` over the workers and returns the token column they compute, `[T]`, in batch order."""
        shards = batch.shards(len(self))
        parts = await self.each(method, [(batch.select(shard), *arguments) for shard in shards])
        return batch.gather(shards, parts)

    async def _gather(self, references: list[Any]) -> list[Any]:
        try:
            return list(await asyncio.gather(*references))
        except ray.exceptions.RayTaskError as error:
            # The worker's own error, as it was raised there, reads better than Ray's wrapping of it.
            raise (error.cause if isinstance(error.cause, RollError) else error) from error
        except ray.exceptions.RayActorError as error:
            raise WorkerDied(
                f"a {self.role} worker died: {_last_line(error)}", hint="see its log in the run's `logs/latest/`"
            ) from error

    def kill(self) -> None:
        """Ends the workers at once."""
        for worker in self.workers:
            ray.kill(worker)


def worker_specs(
    role: str, count: int, threads: int, values: Mapping[str, Any], folder: str | None, logs: str | None
) -> list[WorkerSpec]:
    """Returns the specifications of a role's workers."""
    return [WorkerSpec(role, rank, count, threads, values, folder, logs) for rank in range(count)]


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
