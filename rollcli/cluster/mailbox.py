"""Many small requests to one actor in few calls: requests of one moment travel together, results come as they are done.

    caller:  await call(request) ─┐                      ┌─▶ future resolved
             await call(request) ─┴─ submit([…]) ──▶ actor works, posts each result ── collect() ─┘

One remote call per request would cost a millisecond each; this costs two calls per moment, however many requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from typing import Any

import ray

from rollcli.errors import WorkerDied

COLLECT_LIMIT_S = 5.0
GATHER_S = 0.002
"""How long a caller waits for more requests before it sends; long enough for a group's samples to leave together."""


class Mailbox:
    """The actor's side: finished results, waiting for the clients that asked. Used from one event loop."""

    def __init__(self) -> None:
        self._ready: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        self._arrived: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def post(self, client: str, key: int, result: Any) -> None:
        """Puts one result where `client` finds it."""
        self._ready[client].append((key, result))
        self._arrived[client].set()

    async def collect(self, client: str) -> list[tuple[int, Any]]:
        """Waits for results, at most `COLLECT_LIMIT_S`, and returns all there are."""
        arrived = self._arrived[client]
        try:
            await asyncio.wait_for(arrived.wait(), COLLECT_LIMIT_S)
        except TimeoutError:
            return []
        arrived.clear()
        return self._ready.pop(client, [])


class Caller:
    """The asking side: `await call(request)` for an actor that has `submit(client, requests)` and `collect(client)`.

    When the actor dies, every call in flight raises `WorkerDied`.
    """

    def __init__(self, actor: Any, client: str, name: str) -> None:
        self.actor = actor
        self.client = client
        self.name = name
        self._keys = itertools.count()
        self._unsent: list[tuple[int, Any]] = []
        self._waiting: dict[int, asyncio.Future] = {}
        self._collector: asyncio.Task | None = None

    @property
    def in_flight(self) -> int:
        """Calls not yet answered."""
        return len(self._waiting)

    def start(self, request: Any) -> tuple[int, asyncio.Future]:
        """Sends a request; returns its key, which cancels it by name, and the future of its result."""
        loop = asyncio.get_running_loop()
        key = next(self._keys)
        self._waiting[key] = loop.create_future()
        if not self._unsent:
            loop.call_later(GATHER_S, self._send)
        self._unsent.append((key, request))
        if self._collector is None or self._collector.done():
            self._collector = loop.create_task(self._collect())
        return key, self._waiting[key]

    async def call(self, request: Any) -> Any:
        """Returns the actor's result for `request`.

        Raises:
            WorkerDied: the actor ended.
        """
        return await self.start(request)[1]

    def forget(self, key: int) -> None:
        """Drops a request whose result nobody waits for any more."""
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.cancel()

    def reset(self) -> None:
        """Drops every request in flight."""
        self._unsent = []
        for key in list(self._waiting):
            self.forget(key)

    def _send(self) -> None:
        if self._unsent:
            self.actor.submit.remote(self.client, self._unsent)
            self._unsent = []

    async def _collect(self) -> None:
        while self._waiting:
            try:
                results = await self.actor.collect.remote(self.client)
            except ray.exceptions.RayActorError as error:
                self._fail(WorkerDied(f"{self.name} died: {_cause(error)}"))
                return
            except ray.exceptions.RayTaskError as error:
                self._fail(error.cause if isinstance(error.cause, Exception) else error)
                return
            for key, result in results:
                future = self._waiting.pop(key, None)
                if future is not None and not future.done():
                    future.set_result(result)

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)


def _cause(error: ray.exceptions.RayActorError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
