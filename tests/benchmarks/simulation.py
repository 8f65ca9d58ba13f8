"""A model of a training cluster, in virtual time: what surrounds the real scheduler in `scheduling.py`."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import selectors
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollcli.cluster.mailbox import Mailbox
from rollcli.data.carriers import Task, Trajectory
from rollcli.rollout.environment_worker import EpisodeOrder, EpisodeReport

GROUP, MAX_ROWS, BASE_S, ROW_S = 16, 128, 0.008, 0.0002
MEDIAN, LONGEST, SPREAD = 1600, 32_000, math.log(20) / 3.5
REWARD_S, REWARDS_PER_DEVICE = 1.0, 4

Turn = Callable[[random.Random], tuple[float, float]]


class Jump(selectors.DefaultSelector):
    """Waits for nothing: moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        """Returns what is ready, after the timeout, without having waited for it."""
        if timeout is None:
            raise RuntimeError("everything waits, and no timer is set")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self.jump = Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        """Returns seconds of virtual time since the start."""
        return self.jump.now


class Replica:
    """Decodes by continuous batching; more rows make every row slower, and a token cheaper."""

    def __init__(self) -> None:
        self.version, self.paused, self.sampled = 0, False, 0.0
        self._rows: list[tuple[float, int, int, asyncio.Future]] = []
        self._queue: deque[tuple[float, asyncio.Future]] = deque()
        self._numbers = itertools.count()
        self._made = self._speed = self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, tokens: float) -> int:
        """Samples an answer; returns the version that sampled its first token."""
        done = asyncio.get_running_loop().create_future()
        self._queue.append((tokens, done))
        self.change()
        try:
            return await done
        except asyncio.CancelledError:
            self._queue = deque(entry for entry in self._queue if not entry[1].cancelled())
            self._progress()
            self._rows = [row for row in self._rows if not row[3].cancelled()]
            heapq.heapify(self._rows)
            self.change()
            raise

    def pause(self) -> None:
        """Stops, for new weights."""
        self.paused = True
        self.change()

    def resume(self, version: int) -> None:
        """Goes on with new weights."""
        self.paused, self.version = False, version
        self.change()

    def change(self) -> None:
        """Ends rows that are done, starts those that wait, and sets a timer for the next one to end."""
        self._progress()
        while self._rows and self._rows[0][0] <= self._made + 1e-6:
            _, _, version, done = heapq.heappop(self._rows)
            if not done.done():
                done.set_result(version)
        while self._queue and len(self._rows) < MAX_ROWS and not self.paused:
            tokens, done = self._queue.popleft()
            heapq.heappush(self._rows, (self._made + tokens, next(self._numbers), self.version, done))
        self._speed = 0.0 if self.paused or not self._rows else 1 / (BASE_S + ROW_S * len(self._rows))
        if self._timer is not None:
            self._timer.cancel()
        if self._speed:
            wait = (self._rows[0][0] - self._made) / self._speed
            self._timer = asyncio.get_running_loop().call_later(max(wait, 0.0), self.change)

    def _progress(self) -> None:
        now = asyncio.get_running_loop().time()
        made = (now - self._since) * self._speed
        self._made, self._since = self._made + made, now
        self.sampled += made * len(self._rows)


class Barrier:
    """Scheduling by batch: nobody goes on before everybody who has begun is here, or has left."""

    def __init__(self) -> None:
        self.members = 0
        self._here: list[asyncio.Future] = []

    async def meet(self) -> None:
        """Waits for the others."""
        here = asyncio.get_running_loop().create_future()
        self._here.append(here)
        self.open()
        await here

    def open(self) -> None:
        """Lets everybody on if all are here."""
        if len(self._here) == self.members:
            for here in self._here:
                here.set_result(None)
            self._here = []


@dataclass(frozen=True)
class Setting:
    """One run. `turn` draws tokens and environment seconds of an agent's turn; None: one answer to each problem."""

    prompts: int = 64
    devices: int = 16
    steps: int = 12
    rollout_share: float = 1.0
    train_s: float = 0.0
    staleness: int = 0
    extra: int | None = None
    by_sample: bool = True
    dynamic: bool = False
    turn: Turn | None = None
    capacity: int = MAX_ROWS

    @property
    def replicas(self) -> int:
        """Devices that sample; the others train, and where all do, sampling and training take turns."""
        return round(self.devices * self.rollout_share)


class World:
    """Episodes of one setting, behind the interface of the cluster of environment workers."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.replicas = [Replica() for _ in range(setting.replicas)]
        self.rewards = asyncio.Semaphore(REWARDS_PER_DEVICE * setting.devices)
        self.barrier = Barrier()
        self.attempts: Counter[tuple[int, int]] = Counter()
        self.mailbox = Mailbox()
        self.running: dict[int, asyncio.Task] = {}
        remote = lambda method: SimpleNamespace(remote=lambda *given: asyncio.ensure_future(method(*given)))  # noqa: E731
        methods = {"submit": self.submit, "abort": self.abort, "collect": self.mailbox.collect}
        self.workers = [SimpleNamespace(**{name: remote(method) for name, method in methods.items()})]

    def __len__(self) -> int:
        return len(self.workers)

    async def all(self, method: str) -> None:
        await self.abort("", list(self.running))

    async def submit(self, client: str, orders: list[tuple[int, EpisodeOrder]]) -> None:
        self.barrier.members += len(orders)
        for key, order in orders:
            self.running[key] = asyncio.create_task(self._run(client, key, order))

    async def abort(self, client: str, keys: list[int]) -> None:
        for key in keys:
            if task := self.running.get(key):
                task.cancel()

    async def _run(self, client: str, key: int, order: EpisodeOrder) -> None:
        seed, sample = order.task.seed, order.sample
        # What is drawn depends on the episode alone, so that settings are compared on the same problems and answers.
        problem, luck = random.Random(seed), random.Random(f"{seed}/{sample}/{self.attempts[seed, sample]}")
        self.attempts[seed, sample] += 1
        hardness, pass_rate = problem.gauss(), problem.betavariate(0.4, 0.4)
        hardness = (hardness + luck.gauss()) / math.sqrt(2)
        right, score_s = float(luck.random() < pass_rate), REWARD_S * luck.lognormvariate(-0.5, 1.0)
        try:
            version = await self._play(self.replicas[order.replica], hardness, luck)
        finally:
            self.running.pop(key)
            self.barrier.members -= 1
            self.barrier.open()
        async with self.rewards:
            await asyncio.sleep(score_s)
        one = np.zeros(1, np.int32)
        trajectory = Trajectory(
            order.task.id, sample, one, one == 0, np.zeros(1, np.float32), one + version, reward=right, accuracy=right
        )
        self.mailbox.post(client, key, EpisodeReport(trajectory, None, {}))

    async def _play(self, replica: Replica, hardness: float, luck: random.Random) -> int:
        """Samples one answer, or takes an agent's turns; returns the version of the first token."""
        if self.setting.turn is None:
            version = await replica.generate(min(MEDIAN * math.exp(SPREAD * hardness), LONGEST))
            await self._meet()
            return version
        versions = []
        for _ in range(min(max(round(12 + 7 * hardness), 1), 30)):
            tokens, environment_s = self.setting.turn(luck)
            versions.append(await replica.generate(tokens))
            await self._meet()
            await asyncio.sleep(environment_s)
            await self._meet()
        return versions[0]

    async def _meet(self) -> None:
        if not self.setting.by_sample:
            await self.barrier.meet()


class Stream:
    """Problems without end."""

    def __init__(self) -> None:
        self.drawn = itertools.count()

    def draw(self, progress: float) -> Task:
        index = next(self.drawn)
        return Task("t", index, [], seed=1000 + index)

    def learn(self, outcomes: Any) -> None: ...
