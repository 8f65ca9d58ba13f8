"""A reward worker: scores samples in a child process that a hard time limit can end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcli import registry
from rollcli.cluster.mailbox import Mailbox
from rollcli.cluster.worker import Worker, WorkerSpec
from rollcli.config.schema import RewardConfig
from rollcli.errors import PluginError
from rollcli.rewards.base import RewardResult
from rollcli.rewards.isolation import IsolatedCaller, RewardFailure


@dataclass(frozen=True)
class ScoreRequest:
    """One sample to score by every reward function of its task."""

    rewards: list[RewardConfig]
    fields: dict[str, Any]


class RewardWorker(Worker):
    """Scores one sample after the other; results keep the order of the task's rewards."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        log = Path(spec.logs) / f"{spec.name}-calls.log" if spec.logs else None
        self.caller = IsolatedCaller(log=log)
        self.caller.start()
        self.folder = Path(spec.folder) if spec.folder else None
        self.mailbox = Mailbox()
        self._queue: asyncio.Queue = asyncio.Queue()
        self._scorer: asyncio.Task | None = None

    async def submit(self, client: str, requests: list[tuple[int, ScoreRequest]]) -> None:
        """Queues samples."""
        if self._scorer is None:
            self._scorer = asyncio.create_task(self._score_all())
        for key, request in requests:
            self._queue.put_nowait((client, key, request))

    async def collect(self, client: str) -> list[tuple[int, list[RewardResult | RewardFailure]]]:
        """Returns scores as they are done."""
        return await self.mailbox.collect(client)

    async def _score_all(self) -> None:
        while True:
            # Everything that waits is scored in one trip to the thread, which a sample alone would hardly pay for.
            waiting = [await self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            for start in range(0, len(waiting), 16):
                part = waiting[start : start + 16]
                results = await asyncio.to_thread(self._score, [request for _, _, request in part])
                for (client, key, _), result in zip(part, results, strict=True):
                    self.mailbox.post(client, key, result)

    def _score(self, requests: list[ScoreRequest]) -> list[list[RewardResult | RewardFailure]]:
        return [[self._call(reward, request.fields) for reward in request.rewards] for request in requests]

    def _call(self, reward: RewardConfig, fields: dict[str, Any]) -> RewardResult | RewardFailure:
        try:
            name = registry.absolute(reward.name, self.folder)
        except PluginError as error:  # its file has gone, or is not on this machine
            return RewardFailure("reward", error.message)
        for _ in range(reward.retries + 1):
            result = self.caller.call(name, fields, reward.timeout_s)
            # A call that took too long once will again; it is not worth the time.
            if not isinstance(result, RewardFailure) or result.kind == "timeout":
                break
        return result
