"""A reward worker: scores samples in a child process that a hard time limit can end."""

from __future__ import annotations

import asyncio
import itertools
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

AT_ONCE = 16
"""Samples scored between two looks at what has come or gone."""


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
        self._waiting: dict[tuple[str, int], ScoreRequest] = {}
        self._arrived = asyncio.Event()
        self._scorer: asyncio.Task | None = None

    async def submit(self, client: str, requests: list[tuple[int, ScoreRequest]]) -> None:
        """Queues samples."""
        if self._scorer is None:
            self._scorer = asyncio.create_task(self._score_all())
        self._waiting |= {(client, key): request for key, request in requests}
        self._arrived.set()

    async def collect(self, client: str) -> list[tuple[int, list[RewardResult | RewardFailure]]]:
        """Returns scores as they are done."""
        return await self.mailbox.collect(client)

    async def abort(self, client: str, keys: list[int]) -> None:
        """Drops samples that wait to be scored."""
        for key in keys:
            self._waiting.pop((client, key), None)

    async def _score_all(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                # Several are scored in one trip to the thread, which a sample alone would hardly pay for.
                part = [(at, self._waiting.pop(at)) for at in list(itertools.islice(self._waiting, AT_ONCE))]
                results = await asyncio.to_thread(self._score, [request for _, request in part])
                for ((client, key), _), result in zip(part, results, strict=True):
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
