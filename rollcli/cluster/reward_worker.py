"""A reward worker: scores samples in a child process that a hard time limit can end, or by asking models.

a function           child process (rewards/isolation.py), one sample after the other
`judge`, …           coroutines, many at once, that ask an endpoint or the workers of a reward model
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcli import registry
from rollcli.cluster.asked import AskedModels, Asker
from rollcli.cluster.mailbox import Mailbox
from rollcli.cluster.worker import Worker, WorkerSpec
from rollcli.config.schema import RewardConfig
from rollcli.errors import EngineError, PluginError, WorkerDied
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import IsolatedCaller, RewardFailure

AT_ONCE = 16
"""Samples scored between two looks at what has come or gone."""

Scores = list[RewardResult | RewardFailure]


@dataclass(frozen=True)
class ScoreRequest:
    """One sample to score by every reward of its task."""

    rewards: list[RewardConfig]
    fields: dict[str, Any]


class RewardWorker(Worker):
    """Scores samples; results keep the order of the task's rewards.

    A result is an exception where a reward model's worker ended meanwhile, or its engine failed: the sample is to be
    scored again, or the run to end.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        log = Path(spec.logs) / f"{spec.name}-calls.log" if spec.logs else None
        self.caller = IsolatedCaller(log=log)
        self.caller.start()
        self.folder = Path(spec.folder) if spec.folder else None
        self.mailbox = Mailbox()
        models = getattr(self.recipe, "reward_models", [])
        # Not the name alone: answers to a predecessor, whose keys were the same, must not be taken for its own.
        self.models = AskedModels(models, f"{spec.name}/{uuid.uuid4().hex}", spec.count)
        self.asker = Asker(self.models)
        self._waiting: dict[tuple[str, int], ScoreRequest] = {}
        self._parts: dict[tuple[str, int], asyncio.Future[Scores]] = {}
        self._asking: dict[tuple[str, int], asyncio.Task] = {}
        self._arrived = asyncio.Event()
        self._scorer: asyncio.Task | None = None

    def connect(self, models: Mapping[str, list[Any]]) -> None:
        """Tells the worker whom it may ask: the workers of reward models, by role."""
        self.models.connect(models)

    def reconnect(self, role: str, rank: int, actor: Any) -> None:
        """Tells the worker of a reward model's worker that took another's place."""
        self.models.reconnect(role, rank, actor)

    async def submit(self, client: str, requests: list[tuple[int, ScoreRequest]]) -> None:
        """Queues samples."""
        if self._scorer is None:
            self._scorer = asyncio.create_task(self._score_all())
        for key, request in requests:
            if any(self.asker.asks(reward) for reward in request.rewards):
                task = asyncio.create_task(self._score_mixed(client, key, request))
                self._asking[client, key] = task
                task.add_done_callback(lambda _, at=(client, key): self._asking.pop(at, None))
            else:
                self._waiting[client, key] = request
        self._arrived.set()

    async def collect(self, client: str) -> list[tuple[int, Scores | Exception]]:
        """Returns scores as they are done."""
        return await self.mailbox.collect(client)

    async def abort(self, client: str, keys: list[int]) -> None:
        """Drops samples that wait to be scored, or for a model's answer."""
        for key in keys:
            self._waiting.pop((client, key), None)
            if task := self._asking.get((client, key)):
                task.cancel()

    async def _score_mixed(self, client: str, key: int, request: ScoreRequest) -> None:
        """Scores a sample some of whose rewards ask a model; its functions take their turn in the queue meanwhile."""
        asking = [reward for reward in request.rewards if self.asker.asks(reward)]
        functions = [reward for reward in request.rewards if not self.asker.asks(reward)]
        answers = asyncio.gather(
            *(self.asker.score(reward, request.fields) for reward in asking), return_exceptions=True
        )
        scored: Scores = []
        try:
            if functions:
                self._parts[client, key] = asyncio.get_running_loop().create_future()
                self._waiting[client, key] = ScoreRequest(functions, request.fields)
                self._arrived.set()
                scored = await self._parts[client, key]
            found = await answers
        finally:
            answers.cancel()
            self._parts.pop((client, key), None)
        results = {id(reward): result for reward, result in zip((*functions, *asking), (*scored, *found), strict=True)}
        ordered = [_told(reward, results[id(reward)]) for reward in request.rewards]
        ended = next((each for each in ordered if isinstance(each, Exception)), None)
        self.mailbox.post(client, key, ordered if ended is None else ended)

    async def _score_all(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                # Several are scored in one trip to the thread, which a sample alone would hardly pay for.
                part = [(at, self._waiting.pop(at)) for at in list(itertools.islice(self._waiting, AT_ONCE))]
                results = await asyncio.to_thread(self._score, [request for _, request in part])
                for (at, _), result in zip(part, results, strict=True):
                    if at not in self._parts:
                        self.mailbox.post(*at, result)
                    elif not self._parts[at].done():
                        self._parts[at].set_result(result)

    def _score(self, requests: list[ScoreRequest]) -> list[Scores]:
        return [[self._call(reward, request.fields) for reward in request.rewards] for request in requests]

    def _call(self, reward: RewardConfig, fields: dict[str, Any]) -> RewardResult | RewardFailure:
        try:
            name = registry.absolute(reward.name, self.folder)
        except PluginError as error:  # its file has gone, or is not on this machine
            return RewardFailure("reward", error.message)
        for _ in range(reward.retries + 1):
            result = self.caller.call(name, {**fields, **reward.args}, reward.timeout_s)
            # A call that took too long once will again; it is not worth the time.
            if not isinstance(result, RewardFailure) or result.kind == "timeout":
                break
        return result


def _told(reward: RewardConfig, result: Any) -> RewardResult | RewardFailure | Exception:
    """Returns what became of one reward: a bug in a class that asks costs its own sample."""
    if isinstance(result, (WorkerDied, EngineError)) or not isinstance(result, BaseException):
        return result
    return RewardFailure("reward", f"reward `{reward.title}` raised {type(result).__name__}: {str(result)[:300]}")
