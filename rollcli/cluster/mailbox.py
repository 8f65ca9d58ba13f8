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

from rollcli.cluster.death import understood

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

    def wake(self) -> None:
        """Lets everyone who waits return with what there is."""
        for arrived in self._arrived.values():
            arrived.set()

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

    When the actor dies, or cannot take or answer requests, the calls concerned raise.
    """

    def __init__(self, actor: Any, client: str, name: str) -> None:
        self.actor = actor
        self.client = client
        self.name = name
        self._keys = itertools.count()
        self._unsent: list[tuple[int, Any]] = []
        self._waiting: dict[int, asyncio.Future] = {}
        self._sending: set[asyncio.Task] = set()
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
            self._collector.add_done_callback(lambda ended: self._ended(ended, list(self._waiting)))
        return key, self._waiting[key]

    async def call(self, request: Any) -> Any:
        """Returns the actor's result for `request`.

        Raises:
            WorkerDied: the actor ended.
            Exception: the actor could not take requests or answer them.
        """
        key, future = self.start(request)
        try:
            return await future
        finally:
            self.forget(key)

    def forget(self, key: int) -> None:
        """Drops a request whose result nobody waits for any more."""
        future = self._waiting.pop(key, None)
        if future is not None:
            self._unsent = [(unsent, request) for unsent, request in self._unsent if unsent != key]
            future.cancel()

    def reset(self) -> None:
        """Drops every request in flight."""
        self._unsent.clear()
        for key in list(self._waiting):
            self.forget(key)

    def _send(self) -> None:
        requests, self._unsent = self._unsent, []
        if requests:
            task = asyncio.get_running_loop().create_task(self._submit(requests))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            task.add_done_callback(lambda ended: self._ended(ended, [key for key, _ in requests]))

    async def _submit(self, requests: list[tuple[int, Any]]) -> None:
        await self.actor.submit.remote(self.client, requests)

    async def _collect(self) -> None:
        while self._waiting:
            for key, result in await self.actor.collect.remote(self.client):
                future = self._waiting.pop(key, None)
                if future is not None and not future.done():
                    future.set_result(result)

    def _ended(self, task: asyncio.Task, keys: list[int]) -> None:
        """Hands an error of the traffic itself to those who would otherwise wait for ever."""
        if task.cancelled() or task.exception() is None:
            return
        error = understood(task.exception(), {self.name: self.actor})
        for key in keys:
            future = self._waiting.pop(key, None)
            if future is not None and not future.done():
                future.set_exception(error)
