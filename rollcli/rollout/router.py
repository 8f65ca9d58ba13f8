"""Which replica serves a group, and when: all its samples on one, so that they share the prompt's cache; the least
loaded one; and only when it has room, so that the time an episode waits for its turn is not its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Place:
    """A group's place on a replica; it shrinks as its samples finish."""

    def __init__(self, router: Router, replica: int, samples: int) -> None:
        self.replica = replica
        self.samples = samples
        self._router = router

    def give_back(self, samples: int = 1) -> None:
        """Makes room for others: that many samples are done."""
        samples = min(samples, self.samples)  # of a group that failed everything has been given back
        self.samples -= samples
        self._router.release(self.replica, samples)


class Router:
    """Counts samples in flight per replica and lets groups in, first come, first served.

    Args:
        replicas: number of replicas.
        capacity: most samples in flight on one replica; None for no limit. A group larger than that is let in alone.
    """

    def __init__(self, replicas: int, capacity: int | None = None) -> None:
        self.load = [0] * replicas
        self.open = [True] * replicas
        self.capacity = capacity
        self._queue: deque[tuple[int, asyncio.Future[int]]] = deque()

    @property
    def waiting(self) -> int:
        """Samples of groups that wait for room."""
        return sum(samples for samples, turn in self._queue if not turn.done())

    @asynccontextmanager
    async def place(self, samples: int) -> AsyncIterator[Place]:
        """Waits for room for a group and holds it until the block ends."""
        place = Place(self, await self._turn(samples), samples)
        try:
            yield place
        finally:
            place.give_back(place.samples)

    def release(self, replica: int, samples: int) -> None:
        """Takes samples off a replica and lets in whoever now has room."""
        self.load[replica] -= samples
        while self._queue and (self._queue[0][1].done() or self._fits(self._queue[0][0])):
            wanted, turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(self._take(wanted))

    def close(self, replica: int) -> None:
        """Lets no more groups in on a replica; those that are there keep their places.

        Raises:
            ValueError: it is the last one.
        """
        if sum(self.open) == 1 and self.open[replica]:
            raise ValueError(f"replica {replica} is the last one: nothing would sample")
        self.open[replica] = False

    def reopen(self, replica: int) -> None:
        """Lets groups in on a replica, new or closed before."""
        while len(self.load) <= replica:
            self.load.append(0)
            self.open.append(False)
        self.open[replica] = True
        self.release(replica, 0)

    def least_loaded(self) -> int:
        """Returns the open replica with the fewest samples in flight."""
        return min((replica for replica, is_open in enumerate(self.open) if is_open), key=self.load.__getitem__)

    async def _turn(self, samples: int) -> int:
        if not self._queue and self._fits(samples):
            return self._take(samples)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append((samples, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            # Cancelled in the moment its turn came: what was taken for it goes to the next.
            if not turn.cancelled():
                self.release(turn.result(), samples)
            raise

    def _fits(self, samples: int) -> bool:
        least = self.load[self.least_loaded()]
        return self.capacity is None or least == 0 or least + samples <= self.capacity

    def _take(self, samples: int) -> int:
        replica = self.least_loaded()
        self.load[replica] += samples
        return replica
