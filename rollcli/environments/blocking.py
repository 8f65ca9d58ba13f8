"""Calls of an environment that may block: each in a thread of its own, so that it cannot hold up other episodes."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

from rollcli.environments.base import Environment


async def perform(environment: Environment, method: str, *arguments: Any) -> Any:
    """Calls a method of an environment; one whose class says `blocking = True` runs in a thread.

    There the method may be a plain function or a coroutine function, which gets an event loop of its own. The thread is
    a daemon and no member of a pool: a call that never returns costs its episode, and neither a place among the
    threads of others nor the end of the process.
    """
    call = getattr(environment, method)
    if not getattr(environment, "blocking", False):
        return await call(*arguments)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        try:
            result = asyncio.run(call(*arguments)) if inspect.iscoroutinefunction(call) else call(*arguments)
        except BaseException as error:
            # A future takes no StopIteration. Raised again, the error's traceback is in the worker's log.
            tell(None, RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error)
            raise
        tell(result, None)

    def tell(result: Any, error: BaseException | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name=f"environment-{method}").start()
    return await future
