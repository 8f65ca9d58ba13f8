"""Continuous batching on all rollout replicas, as a fluid between events.

Between two events the rows of a replica all gain tokens at one speed, which depends on how many they are. So a row ends
where its replica's count of tokens reaches what it was when the row began plus the row's length, and what comes next on
a replica is the top of a heap: an event costs O(log rows), whatever the lengths.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from rollcli.devices.workload import Schedule, Speeds

_EPSILON = 1e-6  # tokens by which rounding may miss the end of a row


class Replicas:
    """All rollout replicas: rows, clocks in tokens, and time owed to prefill or to a pause.

    Args:
        push: called with time, replica and stamp of the next moment at which a row ends; a later one replaces it.
    """

    def __init__(self, speeds: Speeds, schedule: Schedule, push: Callable[[float, int, int], None]) -> None:
        count = schedule.replicas
        self.step_s, self.top, self.push = speeds.step_s, len(speeds.step_s) - 1, push
        self.rows: list[list] = [[] for _ in range(count)]
        self.made, self.since = [0.0] * count, [0.0] * count
        self.held, self.owed, self.stamp = [0.0] * count, [0.0] * count, [0] * count
        self.paused_until = 0.0
        self.decoding_s = self.sampled = self.row_s = 0.0
        self.busy = 0
        self.numbers = itertools.count()

    def add(self, replica: int, now: float, tokens: float, prefill_s: float, sample: list) -> None:
        """Starts a row."""
        rows = self.rows[replica]
        if rows:
            self.progress(replica, now)
        else:
            self.busy += 1
            self.since[replica], self.owed[replica] = now, 0.0
            self.held[replica] = max(self.paused_until - now, 0.0)
        self.owed[replica] += prefill_s
        heapq.heappush(rows, (self.made[replica] + tokens, next(self.numbers), sample))

    def ended(self, replica: int, now: float) -> list[list]:
        """Returns the samples whose rows have ended, which are taken off."""
        self.progress(replica, now)
        rows, edge, found = self.rows[replica], self.made[replica] + _EPSILON, []
        while rows and rows[0][0] <= edge:
            found.append(heapq.heappop(rows)[2])
        self.busy -= bool(found) and not rows
        return found

    def schedule(self, replica: int, now: float) -> None:
        """Says when the next row ends."""
        self.stamp[replica] += 1
        rows = self.rows[replica]
        if rows:
            wait = max(rows[0][0] - self.made[replica], 0.0) * self.seconds(len(rows))
            self.push(now + self.held[replica] + self.owed[replica] + wait, replica, self.stamp[replica])

    def seconds(self, rows: int) -> float:
        """Returns the seconds of a decode step of that many rows."""
        return self.step_s[rows] if rows <= self.top else self.step_s[-1] * rows / self.top

    def progress(self, replica: int, now: float) -> None:
        """Brings a replica's clock to now."""
        elapsed, self.since[replica] = now - self.since[replica], now
        rows = len(self.rows[replica])
        if not rows or elapsed <= 0:
            return
        if held := self.held[replica]:
            stood = min(held, elapsed)
            self.held[replica], elapsed = held - stood, elapsed - stood
        self.decoding_s += elapsed
        if owed := self.owed[replica]:
            paid = min(owed, elapsed)
            self.owed[replica], elapsed = owed - paid, elapsed - paid
        made = elapsed / self.seconds(rows)
        self.made[replica] += made
        self.sampled += made * rows
        self.row_s += elapsed * rows

    def pause(self, now: float, seconds: float) -> None:
        """Lets all stand, rows and all, for some seconds."""
        if seconds <= 0:
            return
        self.paused_until = max(self.paused_until, now) + seconds
        for replica, rows in enumerate(self.rows):
            if rows:
                self.progress(replica, now)
                self.held[replica] += seconds
                self.schedule(replica, now)

    def clear(self, now: float) -> None:
        """Takes all rows off."""
        for replica, rows in enumerate(self.rows):
            if rows:
                self.progress(replica, now)
                rows.clear()
                self.stamp[replica] += 1
        self.busy = 0
