"""A rollout replica: one inference engine in an actor, stepping in a thread of its own while requests come and go.

Only that thread touches the engine: what others want of it is queued and done between two steps. A lock would not do,
for a thread that steps without a pause may take it again, many times, before one who waits for it wakes up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollcli import registry
from rollcli.cluster.mailbox import Mailbox
from rollcli.cluster.payload import Entry
from rollcli.cluster.weight_receiver import WeightReceiver
from rollcli.cluster.weight_sender import BucketFacts
from rollcli.cluster.worker import Worker, WorkerSpec
from rollcli.config.schema import RlRecipe
from rollcli.engines.base import Completion, GenerateRequest, InferEngine
from rollcli.errors import EngineError, RollError, WeightSyncError


class RolloutWorker(Worker):
    """One replica. Requests carry `(key, GenerateRequest)`; results are `Completion`s."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        import torch

        torch.set_num_threads(spec.threads)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.recipe = self.take_recipe(self.recipe)
        rollout = self.recipe.rollout
        engine = registry.resolve("infer_engines", rollout.engine)
        self.engine: InferEngine = engine.load(
            self.recipe.model, device=device, seed=self.recipe.seed, max_rows=rollout.max_rows,
            parallel=rollout.parallel, **rollout.engine_args,
        )  # fmt: skip
        self.device = device
        self.receiver = WeightReceiver()
        self.mailbox = Mailbox()
        self._owners: dict[str, tuple[str, int]] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: EngineError | None = None
        self._busy_since: float | None = None

    def take_recipe(self, recipe: RlRecipe) -> RlRecipe:
        """Returns the recipe whose model the replica loads; a judge's is another."""
        return recipe

    def stuck_s(self) -> float:
        """Returns for how long the engine has been in one and the same step or call."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    async def submit(self, client: str, requests: list[tuple[int, GenerateRequest]]) -> None:
        """Queues requests."""
        # Named anew: a request may come again, with the same id, while the engine still ends the one it replaces.
        ours = [dataclasses.replace(request, id=_id(client, key)) for key, request in requests]
        self._owners |= {request.id: (client, key) for request, (key, _) in zip(ours, requests, strict=True)}
        await self._between_steps(lambda: self.engine.add(ours))

    async def collect(self, client: str) -> list[tuple[int, Completion]]:
        """Returns completions as they finish.

        Raises:
            EngineError: a step of the engine failed; it takes no more.
        """
        done = await self.mailbox.collect(client)
        if self._failure is not None:
            raise self._failure
        return done

    async def abort(self, client: str, keys: list[int]) -> None:
        """Ends requests; their tokens so far are returned as usual."""
        await self._between_steps(lambda: self.engine.abort([_id(client, key) for key in keys]))

    async def begin_weights(self) -> None:
        """Gets ready to stage weights."""
        # Not before a commit that its caller gave up waiting for: it would keep the wrong weights for those loaded.
        await self._between_steps(self.receiver.begin)

    async def stage_bucket(self, entries: dict[str, Entry], facts: BucketFacts) -> None:
        """Stages a bucket of weights."""
        self.receiver.stage(entries, facts)

    async def stage_lent(self, handles: dict[str, Any], facts: BucketFacts) -> None:
        """Stages a bucket of weights out of the memory of a shared GPU."""
        self.receiver.stage_lent(handles, facts)

    async def join_weights(self, host: str, port: int, size: int, rank: int) -> None:
        """Joins the members between whom weights are broadcast."""
        from rollcli.cluster.collective import Collective

        self.collective = await asyncio.to_thread(Collective, host, port, size, rank, self.device)

    async def receive_weights(self) -> int:
        """Stages all buckets that are broadcast; returns their bytes. Sampling goes on meanwhile."""
        # This one to its end: after a sync that broke off there will be another.
        received, collective = 0, self.collective
        while (bucket := await asyncio.to_thread(collective.receive))[1] is not None:
            self.receiver.stage(*bucket)
            received += bucket[1].bytes
        return received

    async def commit_weights(self, version: int) -> None:
        """Loads what is staged, between two decoding steps.

        Raises:
            WeightSyncError: the engine refuses a name or a shape, or computes with something else than was sent.
        """
        await self._between_steps(lambda: self._load(version))

    def _load(self, version: int) -> None:
        self.engine.load_weights(self.receiver.whole(), version)
        self.receiver.loaded()
        expected = self.receiver.checksums
        if expected:
            held = self.engine.checksums()
            if wrong := [name for name, sum_ in expected.items() if name in held and held[name] != sum_]:
                raise WeightSyncError(
                    f"after the sync `{wrong[0]}` and {len(wrong) - 1} more differ from the trainer's"
                )

    async def held_weights(self) -> dict[str, Entry]:
        """Returns what was loaded last, for a replica that starts late."""
        return self.receiver.copy()

    async def take_copy(self, entries: dict[str, Entry]) -> None:
        """Stages what another replica holds."""
        self.receiver.take_copy(entries)

    async def offload(self) -> None:
        """Leaves the device to training."""
        await self._between_steps(self.engine.offload)

    async def onload(self) -> None:
        """Takes the device back."""
        await self._between_steps(self.engine.onload)

    def context(self) -> int:
        """Returns the most tokens, prompt and answer together, that the engine takes."""
        return self.engine.max_context

    def model_seconds(self) -> float:
        """Returns the seconds spent in the model so far."""
        return self.engine.stats()["model_s"]

    async def _between_steps(self, call: Callable[[], Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._run, daemon=True, name="engine").start()
        answer: Future = Future()
        self._calls.put((call, answer))
        return await asyncio.wrap_future(answer)

    def _run(self) -> None:
        """Steps the engine for as long as it has work; what finished goes to whoever asked."""
        while True:
            idle = self._failure is not None or not self.engine.pending
            while idle or not self._calls.empty():
                self._answer(*self._calls.get())
                idle = False
            if self._failure is None and self.engine.pending:
                stepped: Future = Future()
                self._answer(self.engine.step, stepped)
                self._take(stepped)

    def _answer(self, call: Callable[[], Any], answer: Future) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        self._busy_since = time.monotonic()
        try:
            if self._failure is not None:
                raise self._failure
            answer.set_result(call())
        # The border of a worker call: whatever the engine raises must reach those who wait for it.
        except Exception as error:
            answer.set_exception(error)
        finally:
            self._busy_since = None

    def _take(self, stepped: Future) -> None:
        """Hands out what a step finished; a step that failed was the last one."""
        error = stepped.exception()
        if error is None:
            if stepped.result():
                self._loop.call_soon_threadsafe(self._deliver, stepped.result())
            return
        traceback.print_exception(error)
        reason = error.message if isinstance(error, RollError) else f"{type(error).__name__}: {error}"
        self._failure = EngineError(
            f"the engine of `{self.spec.name}` failed: {reason}",
            hint=f"see `logs/latest/{self.spec.name}.log` in the run's directory",
        )
        self._loop.call_soon_threadsafe(self.mailbox.wake)

    def _deliver(self, finished: list[Completion]) -> None:
        for completion in finished:
            client, key = self._owners.pop(completion.id)
            self.mailbox.post(client, key, completion)


def _id(client: str, key: int) -> str:
    return f"{client}/{key}"
