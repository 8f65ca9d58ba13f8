"""Stand-ins for what surrounds an episode and the scheduler: a few lines each, no Ray, no model."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np

from rollcli.cluster.mailbox import Mailbox
from rollcli.data.carriers import Task, Trajectory
from rollcli.engines.base import Completion, GenerateRequest
from rollcli.errors import WorkerDied
from rollcli.rollout.environment_worker import EpisodeOrder, EpisodeReport


class Format:
    """One token per character; a turn of the model ends with `.`, and `>` opens the next one."""

    stop_token_ids = (ord("."),)
    forbidden = ()

    def images(self, messages: list[dict]) -> None:
        return None

    def prompt(self, messages: list[dict], images: None = None) -> np.ndarray:
        return self.ids("".join(message["content"] for message in messages) + ">")

    def between(
        self, messages: list[dict], observed: list[dict], images: None = None, ended: bool = True
    ) -> np.ndarray:
        return self.prompt(observed)

    def text(self, ids: np.ndarray) -> str:
        return "".join(map(chr, ids)).removesuffix(".")

    def ids(self, text: str) -> np.ndarray:
        return np.array([ord(character) for character in text], dtype=np.int32)


class Model:
    """Says the given texts, one a request, cut to the budget; keeps the requests."""

    def __init__(self, *texts: str, version: int = 0) -> None:
        self.texts = list(texts)
        self.version = version
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        text = self.texts.pop(0)
        tokens = Format().ids(text)[: request.sampling.max_tokens]
        count = len(tokens)
        versions = np.full(count, self.version, np.int32)
        self.version += 1
        reason = "stop" if count and tokens[-1] == ord(".") else "length"
        return Completion(request.id, tokens, -0.25 * np.arange(1, count + 1, dtype=np.float32), versions, reason)


class Method:
    """Stands for a remote method: `remote` starts it."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.remote = lambda *arguments: asyncio.ensure_future(function(*arguments))


def trajectory(order: EpisodeOrder, accuracy: float, **values: Any) -> Trajectory:
    """Returns a finished episode of an order: one prompt token, and two sampled ones that tell which order."""
    tokens = np.array([0, order.task.index, order.sample], dtype=np.int32)
    return Trajectory(
        order.task.id, order.sample, tokens, tokens >= np.array([1, 0, 0]), np.zeros(3, np.float32),
        np.array([-1, 0, 0], np.int32), reward=accuracy, accuracy=accuracy, stop_reason="stop", **values,
    )  # fmt: skip


Play = Callable[[EpisodeOrder], Trajectory | list[Trajectory] | Exception | None]
"""What becomes of an order; None: it never ends."""


class EnvironmentDouble:
    """An environment worker whose episodes end in an order of `luck`'s choosing."""

    def __init__(self, play: Play, luck: int | None) -> None:
        self.play = play
        self.random = None if luck is None else random.Random(luck)
        self.mailbox = Mailbox()
        self.orders: list[EpisodeOrder] = []
        self.running: dict[int, asyncio.Task] = {}
        self.submit = Method(self._submit)
        self.collect = Method(self.mailbox.collect)
        self.abort = Method(self._abort)

    async def _submit(self, client: str, orders: list[tuple[int, EpisodeOrder]]) -> None:
        for key, order in orders:
            self.orders.append(order)
            self.running[key] = asyncio.create_task(self._run(client, key, order))
            self.running[key].add_done_callback(lambda _, key=key: self.running.pop(key, None))

    async def _run(self, client: str, key: int, order: EpisodeOrder) -> None:
        for _ in range(self.random.randrange(60) if self.random else 0):
            await asyncio.sleep(0)
        result = self.play(order)
        if result is None:
            await asyncio.Event().wait()
        error = result if isinstance(result, Exception) else None
        living = {"generating": len(self.running) - 1} if len(self.running) > 1 else {}
        self.mailbox.post(
            client, key, EpisodeReport([] if error else result if isinstance(result, list) else [result], error, living)
        )

    async def _abort(self, client: str, keys: list[int]) -> None:
        for key in keys:
            if key in self.running:
                self.running[key].cancel()


class Environments:
    """The cluster of environment workers; `told` keeps what all of them were told."""

    def __init__(self, play: Play, workers: int = 1, luck: int | None = None) -> None:
        self.workers = [EnvironmentDouble(play, None if luck is None else luck + n) for n in range(workers)]
        self.aborts = 0
        self.told: list[tuple] = []

    def __len__(self) -> int:
        return len(self.workers)

    async def all(self, method: str, *arguments: Any) -> None:
        self.told.append((method, *arguments))
        if method == "abort_all":
            self.aborts += 1
            for worker in self.workers:
                for task in list(worker.running.values()):
                    task.cancel()

    @property
    def orders(self) -> list[EpisodeOrder]:
        return [order for worker in self.workers for order in worker.orders]

    @property
    def running(self) -> int:
        return sum(len(worker.running) for worker in self.workers)


class SupervisorDouble:
    """Replaces whoever is named, as often as `limit` allows, by what `successor` does."""

    def __init__(self, limit: int = 1000, successor: Callable[[str], None] = lambda name: None) -> None:
        self.limit = limit
        self.successor = successor
        self.replaced: list[str] = []
        self.blamed: set[tuple[str, str]] = set()

    def snapshot(self) -> Counter[str]:
        return Counter(self.replaced)

    def blames(self, name: str, episode: str) -> bool:
        return (name, episode) in self.blamed

    async def settled(self, name: str) -> None: ...

    async def replace(self, error: WorkerDied, seen: Counter[str]) -> None:
        if self.replaced.count(error.worker) > seen[error.worker]:
            return
        if len(self.replaced) == self.limit:
            raise error
        self.replaced.append(error.worker)
        self.successor(error.worker)


class Stream:
    """Tasks 0, 1, 2, …; the cursor is how many were drawn. `learned` keeps what it is told."""

    def __init__(self) -> None:
        self.drawn = 0
        self.learned: list[tuple[int, float]] = []
        self.progress: list[float] = []

    def draw(self, progress: float = 0.0) -> Task:
        self.drawn += 1
        self.progress.append(progress)
        return self.task("t", self.drawn - 1, self.drawn - 1)

    def task(self, name: str, index: int, row: int) -> Task:
        return task(index, row=row)

    def learn(self, outcomes: Iterable[tuple[Task, float]]) -> None:
        self.learned += [(task.index, accuracy) for task, accuracy in outcomes]

    def state(self) -> int:
        return self.drawn

    def restore(self, state: int) -> None:
        self.drawn = state


def task(index: int, row: int = 0, **payload: Any) -> Task:
    return Task("t", index, [{"role": "user", "content": f"question {index}"}], payload, seed=1000 + index, row=row)
