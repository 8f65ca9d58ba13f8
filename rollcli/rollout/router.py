"""Which replica serves a group: all its samples on one, so that they share the prompt's cache; the least loaded one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Router:
    """Counts samples in flight per replica."""

    def __init__(self, replicas: int) -> None:
        self.load = [0] * replicas

    @contextmanager
    def place(self, samples: int) -> Iterator[int]:
        """Gives the replica for one group for as long as the block runs."""
        replica = self.load.index(min(self.load))
        self.load[replica] += samples
        try:
            yield replica
        finally:
            self.load[replica] -= samples
