"""The endpoint that agents talk to: OpenAI's protocol over HTTP, one server in a process, a session for each episode.

    agent ──HTTP, bearer token──▶ ChatServer ──▶ Session ──▶ the episode's Model

The server listens on 127.0.0.1 alone, at a port that the system chooses, in a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import secrets
import threading
from typing import TYPE_CHECKING

from rollcli.data.carriers import Message
from rollcli.environments.base import Model, Reply
from rollcli.environments.chat_protocol import POLICY, Answer, ChatRequest, Refused, read_request
from rollcli.errors import OutOfTokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    Handler = Callable[[web.Request, "Session"], Awaitable[web.StreamResponse]]

_MOST_BYTES = 64 * 2**20
_START_LIMIT_S = 30.0


class Session:
    """One episode, as its agent is served.

    Args:
        model: the episode's model.
        models: names that stand for it beside `policy`.
        untrained: agents whose chats are no part of the update.

    Attributes:
        spent: set when the agent was told that its tokens, or the context, are spent.
        fault: what else the model failed with, last.
    """

    def __init__(self, model: Model, models: tuple[str, ...] = (), untrained: tuple[str, ...] = ()) -> None:
        self.model = model
        self.models = models
        self.untrained = untrained
        self.spent: OutOfTokens | None = None
        self.fault: BaseException | None = None
        self._said: dict[str, list[str]] = {}
        self._undelivered: dict[str, asyncio.Future[Reply]] = {}

    async def answer(self, request: ChatRequest) -> Answer:
        """Asks the model. What an agent hung up on is kept, and given to it when it asks the same again.

        Raises:
            Refused: the tokens are spent, the model failed, or the episode is over.
        """
        messages = [self._as_said(message) for message in request.messages]
        key = repr((request.agent, messages, request.max_tokens, request.stop, request.tools))
        call = self._undelivered.pop(key, None) or asyncio.ensure_future(
            self.model(
                messages, request.agent, trained=request.agent not in self.untrained, max_tokens=request.max_tokens,
                stop=request.stop, tools=request.tools,
            )
        )  # fmt: skip
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            self._undelivered[key] = call
            raise
        if call.cancelled():
            raise Refused("the episode is over", "episode_over", 503)
        error = call.exception()
        if isinstance(error, OutOfTokens):
            self.spent = error
            raise Refused(error.message, "context_length_exceeded")
        if error is not None:
            self.fault = error
            raise Refused(str(error), "model_failed", 500)
        answer = Answer.of(request, call.result())
        self._said.setdefault(_spoken(answer.message), []).append(answer.reply.text)
        return answer

    def _as_said(self, message: Message) -> Message:
        """Returns an assistant's message in the model's own words, where the model said it and the agent kept it."""
        if message["role"] != "assistant":
            return message
        said = self._said.get(_spoken(message), [])
        if not said:
            return message
        return {"role": "assistant", "content": message["content"] if message["content"] in said else said[-1]}


def _spoken(message: Message) -> str:
    """Returns what two messages share that say the same: white space around it and the names of calls do not count."""
    content = message["content"] or ""
    calls = [
        (function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
        for function in (call["function"] for call in message.get("tool_calls", ()))
        for arguments in [function["arguments"]]
    ]
    return json.dumps([content.strip() if isinstance(content, str) else repr(content), calls], sort_keys=True)


class ChatServer:
    """Serves the sessions of a process; `start` it once."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="chat-server")
        self._runner: web.AppRunner | None = None
        self.url = ""

    def start(self) -> None:
        """Listens at `url`.

        Raises:
            OSError: no port can be had.
        """
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_START_LIMIT_S)

    def close(self) -> None:
        """Stops listening."""
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(_START_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def admit(self, session: Session) -> str:
        """Opens a session; returns the token that leads to it."""
        token = f"roll-{secrets.token_urlsafe(24)}"
        self._sessions[token] = session
        return token

    def dismiss(self, token: str) -> None:
        """Closes a session; its token is unknown from now on."""
        self._sessions.pop(token, None)

    async def _listen(self) -> str:
        from aiohttp import web

        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._served(self._chat))
        app.router.add_get("/v1/models", self._served(self._models))
        # A handler ends with its connection, which is how an agent's own time limit is noticed.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def _served(self, handle: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Returns a handler that looks the session up, and answers what is refused as OpenAI does."""
        from aiohttp import web

        async def handler(request: web.Request) -> web.StreamResponse:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            session = self._sessions.get(token.strip()) if scheme.lower() == "bearer" else None
            try:
                if session is None:
                    raise Refused("no episode has this API key, or it is over", "invalid_api_key", 401)
                return await handle(request, session)
            except Refused as refused:
                # The clients of OpenAI's package ask again on 5xx, unless they are told not to.
                headers = {"x-should-retry": "false"}
                return web.json_response(refused.document(), status=refused.status, headers=headers)

        return handler

    async def _models(self, request: web.Request, session: Session) -> web.StreamResponse:
        from aiohttp import web

        names = (POLICY, *session.models)
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "rollcli"} for name in names]
        return web.json_response({"object": "list", "data": listed})

    async def _chat(self, request: web.Request, session: Session) -> web.StreamResponse:
        from aiohttp import web

        try:
            body = await request.json()
        except ValueError as error:
            raise Refused(f"the request is no JSON: {error}") from error
        answer = await session.answer(read_request(body, session.models))
        if not answer.request.stream:
            return web.json_response(answer.document())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for piece in (*map(json.dumps, answer.chunks()), "[DONE]"):
            await response.write(f"data: {piece}\n\n".encode())
        await response.write_eof()
        return response


_shared: ChatServer | None = None
_starting = threading.Lock()


def shared_server() -> ChatServer:
    """Returns this process's server, started when it is first asked for and closed when the process ends.

    Raises:
        OSError: no port can be had.
    """
    global _shared
    with _starting:
        if _shared is None:
            server = ChatServer()
            server.start()
            atexit.register(server.close)
            _shared = server
    return _shared
