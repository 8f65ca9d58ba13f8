"""A reward model's worker: scores conversations by a sequence classifier, those that wait together in one pass."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np

from rollcli.cluster.judge_worker import reward_model
from rollcli.cluster.mailbox import Mailbox
from rollcli.cluster.worker import Worker, WorkerSpec
from rollcli.errors import ConfigError
from rollcli.rewards.asking import Question
from rollcli.rewards.isolation import RewardFailure


class ClassifierWorker(Worker):
    """One copy of a classifier. Requests carry `(key, Question)`; results are its labels' logits, or a failure."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        import torch

        from rollcli.engines.classifier import Classifier

        torch.set_num_threads(spec.threads)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.config = reward_model(self.recipe, spec.role)
        self.classifier = Classifier(self.config.model, device, self.recipe.seed)
        self.mailbox = Mailbox()
        self._waiting: dict[tuple[str, int], np.ndarray] = {}
        self._arrived = asyncio.Event()
        self._scorer: asyncio.Task | None = None
        self._busy_since: float | None = None

    def stuck_s(self) -> float:
        """Returns for how long the classifier has been in one and the same pass."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    async def submit(self, client: str, requests: list[tuple[int, Question]]) -> None:
        """Queues conversations; one that is too long is never cut, but answered with a failure."""
        if self._scorer is None:
            self._scorer = asyncio.create_task(self._score_all())
        for key, question in requests:
            try:
                ids = self.classifier.tokens(question.messages)
            except ConfigError as error:
                self.mailbox.post(client, key, RewardFailure("reward_model", error.message))
                continue
            if len(ids) > (most := self.classifier.max_context):
                why = f"a conversation of {len(ids)} tokens is longer than the classifier's context of {most}"
                self.mailbox.post(client, key, RewardFailure("reward_model", why))
                continue
            self._waiting[client, key] = ids
        self._arrived.set()

    async def collect(self, client: str) -> list[tuple[int, list[float] | RewardFailure]]:
        """Returns scores as they are done."""
        return await self.mailbox.collect(client)

    async def abort(self, client: str, keys: list[int]) -> None:
        """Drops conversations that wait."""
        for key in keys:
            self._waiting.pop((client, key), None)

    async def _score_all(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                part = [
                    (at, self._waiting.pop(at)) for at in list(itertools.islice(self._waiting, self.config.max_rows))
                ]
                self._busy_since = time.monotonic()
                # What a pass raises, out of memory for one, costs its own samples and keeps nobody else waiting.
                (found,) = await asyncio.gather(
                    asyncio.to_thread(self.classifier.logits, [ids for _, ids in part]), return_exceptions=True
                )
                self._busy_since = None
                for number, (at, _) in enumerate(part):
                    self.mailbox.post(*at, _result(found, number))


def _result(found: np.ndarray | BaseException, number: int) -> list[float] | RewardFailure:
    if isinstance(found, BaseException):
        return RewardFailure("reward_model", f"the classifier failed: {type(found).__name__}: {str(found)[:300]}")
    return found[number].tolist()
