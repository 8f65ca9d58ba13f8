"""Workers that die or hang are ended, explained, and started anew under the same name.

    who notices                                          what follows
    a call raises WorkerDied (rollout/groups.py)         `replace` starts a new worker; the caller asks it again
    no answer to a ping for `hang_s` (`watch`)           the worker is ended; its callers then notice

Replacing is the same whoever asks and however often: a worker that has been replaced since the caller last looked is
left alone. Too many replacements in an hour end the run: something is wrong that starting again will not mend.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import ray

from rollcli.cluster.autopsy import Autopsy
from rollcli.cluster.cluster import Cluster
from rollcli.errors import WorkerDied

HOUR_S = 3600.0
PING_EVERY_S = 5.0
MARGIN_S = 2.0
"""A worker that can tell by itself what blocks it is given time to."""

Prepare = Callable[[int], Awaitable[None]]
"""Makes a new worker of a rank fit for work: loads weights, introduces it to its peers."""


@dataclass
class Supervised:
    """A cluster whose workers may be replaced, and how a new one is prepared."""

    cluster: Cluster
    prepare: Prepare
    locks: dict[int, asyncio.Lock] = field(default_factory=dict)


class Supervisor:
    """Replaces workers.

    Args:
        autopsy: finds out why a worker ended.
        limit: replacements in one hour, of all workers together.
        tell: called with a sentence about each replacement.
        hang_s: a worker that answers no ping for so long, or whose engine takes no step, is taken for hung.
    """

    def __init__(self, autopsy: Autopsy, limit: int, tell: Callable[[str], None], hang_s: float) -> None:
        self.autopsy = autopsy
        self.limit = limit
        self.tell = tell
        self.hang_s = hang_s
        self.replaced = 0
        self._generations: Counter[str] = Counter()
        self._blamed: set[tuple[str, str]] = set()
        self._clusters: dict[str, Supervised] = {}
        self._times: deque[float] = deque()
        self._watching: asyncio.Task | None = None

    def add(self, cluster: Cluster, prepare: Prepare) -> None:
        """Takes charge of a cluster."""
        self._clusters[cluster.role] = Supervised(cluster, prepare)

    def snapshot(self) -> Counter[str]:
        """Returns how often each worker has been replaced so far; a caller takes it before it asks for something."""
        return self._generations.copy()

    async def settled(self, name: str) -> None:
        """Waits until the worker called `name` is not being replaced: before that its successor is not fit for work."""
        role, rank = _parts(name)
        lock = self._clusters[role].locks.get(rank) if role in self._clusters else None
        if lock is not None and lock.locked():
            async with lock:
                pass

    def blames(self, name: str, episode: str) -> bool:
        """Returns whether the worker called `name` once ended because this episode blocked it."""
        return (name, episode) in self._blamed

    async def replace(self, error: WorkerDied, seen: Counter[str]) -> None:
        """Starts a new worker in place of the one that `error` names.

        Args:
            error: why it is needed.
            seen: the snapshot the caller took before; a worker replaced since then is left alone.

        Raises:
            WorkerDied: the worker is nobody's charge, the limit is reached, or the new one does not start.
        """
        role, rank = _parts(error.worker)
        if role not in self._clusters:
            raise error
        # To its end, also where whoever asked is told to give up: half a worker is of no use to the next.
        await asyncio.shield(asyncio.create_task(self._replace(self._clusters[role], rank, error, seen)))

    def watch(self) -> None:
        """Begins to ping the workers; `close` ends it."""
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stops pinging."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    async def _replace(self, supervised: Supervised, rank: int, error: WorkerDied | None, seen: Counter[str]) -> None:
        async with supervised.locks.setdefault(rank, asyncio.Lock()):
            if self._generations[error.worker] > seen[error.worker]:
                return
            while error is not None:
                error = await self._start_anew(supervised, rank, error)

    async def _start_anew(self, supervised: Supervised, rank: int, error: WorkerDied) -> WorkerDied | None:
        """Explains an end and starts a successor; returns how that one ended, if it did before it was fit for work."""
        cause = self.autopsy.cause(error.worker, error)
        if culprit := self.autopsy.culprit(error.worker):
            self._blamed.add((error.worker, culprit))
        self._count(error, cause)
        self.tell(f"worker `{error.worker}` {cause}; a new one takes its place")
        self.replaced += 1
        try:
            await supervised.cluster.respawn(rank, self.replaced)
            await supervised.prepare(rank)
        except WorkerDied as again:
            if again.worker != error.worker:
                raise
            return again
        self._generations[error.worker] += 1
        return None

    def _count(self, error: WorkerDied, cause: str) -> None:
        now = time.monotonic()
        while self._times and now - self._times[0] > HOUR_S:
            self._times.popleft()
        if len(self._times) >= self.limit:
            raise WorkerDied(
                f"worker `{error.worker}` {cause}; {len(self._times)} workers were replaced in the last hour, "
                f"and `rollout.max_restarts_per_hour` is {self.limit}",
                hint=error.hint,
                worker=error.worker,
            )
        self._times.append(now)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PING_EVERY_S)
            await asyncio.gather(
                *(self._ping(role, rank) for role, held in self._clusters.items() for rank in range(len(held.cluster)))
            )

    async def _ping(self, role: str, rank: int) -> None:
        supervised = self._clusters[role]
        if supervised.locks.setdefault(rank, asyncio.Lock()).locked():
            return  # it is being replaced
        worker = supervised.cluster.workers[rank]
        try:
            stuck_s = await asyncio.wait_for(worker.stuck_s.remote(), self.hang_s + MARGIN_S)
        except ray.exceptions.RayError:
            return  # it is dead, which its callers notice
        except TimeoutError:
            stuck_s = self.hang_s
        if stuck_s >= self.hang_s and supervised.cluster.workers[rank] is worker:
            self.autopsy.hung(f"{role}-{rank}", stuck_s)
            ray.kill(worker)


def _parts(name: str) -> tuple[str, int]:
    role, _, rank = name.rpartition("-")
    return (role, int(rank)) if rank.isdigit() else (name, 0)
