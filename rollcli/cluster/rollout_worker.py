"""A rollout replica: one inference engine in an actor, stepping in a thread of its own while requests come and go."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from rollcli import registry
from rollcli.cluster.mailbox import Mailbox
from rollcli.cluster.train_worker import to_tensors
from rollcli.cluster.worker import Worker, WorkerSpec
from rollcli.engines.base import Completion, GenerateRequest


class RolloutWorker(Worker):
    """One replica. Requests carry `(key, GenerateRequest)`; results are `Completion`s."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        import torch

        from rollcli.engines.models import load_policy

        torch.set_num_threads(spec.threads)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        rollout = self.recipe.rollout
        engine = registry.resolve("infer_engines", rollout.engine)
        model = load_policy(self.recipe.model, device, self.recipe.seed)
        self.engine = engine(model, max_rows=rollout.max_rows, **rollout.engine_args)
        self.mailbox = Mailbox()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._owners: dict[str, tuple[str, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None

    async def submit(self, client: str, requests: list[tuple[int, GenerateRequest]]) -> None:
        """Queues requests."""
        self._start()
        with self._lock:
            for key, request in requests:
                self._owners[request.id] = (client, key)
            self.engine.add([request for _, request in requests])
        self._work.set()

    async def collect(self, client: str) -> list[tuple[int, Completion]]:
        """Returns completions as they finish; raises what stopped the engine, if anything did."""
        if self._failure is not None:
            raise self._failure
        return await self.mailbox.collect(client)

    async def abort(self, ids: list[str]) -> None:
        """Ends requests; their tokens so far are returned as usual."""
        with self._lock:
            self.engine.abort(ids)
        self._work.set()

    async def load_weights(self, weights: dict[str, Any], version: int) -> None:
        """Replaces the weights between two decoding steps."""
        await asyncio.to_thread(self._load, weights, version)

    def context(self) -> int:
        """Returns the most tokens, prompt and answer together, that the engine takes."""
        return self.engine.max_context

    def model_seconds(self) -> float:
        """Returns the seconds spent in the model so far."""
        return self.engine.stats()["model_s"]

    def _load(self, weights: dict[str, Any], version: int) -> None:
        with self._lock:
            self.engine.load_weights(to_tensors(weights), version)

    def _start(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._run, daemon=True, name="engine").start()

    def _run(self) -> None:
        """Steps the engine for as long as it has work; what finished goes to whoever asked."""
        while True:
            self._work.wait()
            try:
                with self._lock:
                    if not self.engine.pending:
                        self._work.clear()
                    finished = self.engine.step() if self.engine.pending else []
            # The border of a worker call: whatever the engine raises must reach those who wait for it.
            except Exception as error:
                self._failure = error
                self._loop.call_soon_threadsafe(self._wake_all)
                return
            if finished:
                self._loop.call_soon_threadsafe(self._deliver, finished)

    def _deliver(self, finished: list[Completion]) -> None:
        for completion in finished:
            client, key = self._owners.pop(completion.id)
            self.mailbox.post(client, key, completion)

    def _wake_all(self) -> None:
        for client, key in self._owners.values():
            self.mailbox.post(client, key, Completion("", *([None] * 3), "error", str(self._failure)))
        self._owners.clear()
