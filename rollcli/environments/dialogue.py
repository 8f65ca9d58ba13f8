"""A talk with a user who is played: by the policy itself, by another model, or by a script."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollcli.config.schema import Problems, positive
from rollcli.data.carriers import Message, Task
from rollcli.data.images import text_of
from rollcli.environments.base import Model, StepResult
from rollcli.errors import EpisodeError, OutOfTokens

USER = "user"
"""The agent that the policy is while it plays the user."""
REASONS = ("stop", "max_turns", "script", "budget")
_RETRIES = 3
_RETRY_AFTER_S = 1.0

Talk = Sequence[Message]


@dataclass
class Dialogue:
    """The model answers a user who goes on until the talk is over.

    The problem's messages open it; without any, the user speaks first. In a chat of its own the user is told who it is
    by `persona`, and there the roles are swapped. The rewards' `messages` hold the whole talk up to the last answer;
    a reward with `per_turn: true` scores every answer. Metrics are `turns` and why the talk ended (`ended_stop`,
    `ended_max_turns`, `ended_script`, `ended_budget`).
    """

    user: Literal["policy", "endpoint", "script"] = "script"
    """Who plays the user: `policy`, untrained in that role; `endpoint`, a model elsewhere; or `script`, the texts that
    the problem has."""
    max_turns: int = 8
    """Answers of the model after which the talk ends."""
    persona: str = (
        "You play a user who talks to an assistant. Write only what the user says next, in a few sentences. "
        "When you have what you want, write {stop}.\n\n{goal}"
    )
    """What the user is told of itself; `{column}` is a column of the problem, `{stop}` the stop phrase."""
    stop: str = "[DONE]"
    """What the user writes to end the talk; such a message is not shown to the model."""
    turns: str = "turns"
    """Column of a problem with the user's texts, for `script`; the first opens a talk that nothing else does."""
    user_max_tokens: int = 256
    """Most tokens of a user's text; of the policy they count for a budget of their own."""
    url: str = ""
    """Address of an OpenAI-compatible endpoint, up to `/v1`, for `endpoint`."""
    model: str = ""
    """Model that is asked there."""
    key_env: str | None = None
    """Environment variable of the workers that holds the endpoint's key; null sends none."""
    timeout_s: float = 60.0
    """Most seconds that it may take to answer."""

    def problems(self) -> Problems:
        yield from positive(self, "max_turns", "user_max_tokens", "timeout_s")
        if self.user == "endpoint":
            if not self.url.startswith(("http://", "https://")):
                yield "url", f"must be the address of an endpoint, is `{self.url}`"
            if not self.model:
                yield "model", "name the model that plays the user"
        if not self.stop:
            yield "stop", "must not be empty"

    async def play(self, task: Task, model: Model) -> StepResult:
        """Talks until one of `REASONS` ends it.

        Raises:
            OutOfTokens: the problem is too long.
            EpisodeError: the problem lacks a column, or the endpoint does not answer.
        """
        speak = self._user(task, model)
        talk: list[Message] = list(task.messages)
        turns, reason = 0, ""
        if not any(message["role"] == "user" for message in talk):
            reason = await self._user_turn(talk, speak)
            if reason:
                raise EpisodeError(f"the user ended the talk before it began (`{reason}`)")
        while not reason:
            try:
                reply = await model(list(talk))
            except OutOfTokens:
                if not turns:
                    raise
                reason = "budget"
                break
            talk.append({"role": "assistant", "content": reply.text})
            turns += 1
            if reply.stop_reason == "length":
                reason = "budget"
            else:
                reason = "max_turns" if turns >= self.max_turns else await self._user_turn(talk, speak)
        numbers = {"turns": float(turns), **{f"ended_{each}": float(reason == each) for each in REASONS}}
        return StepResult([], True, 0.0, {**numbers, "done_reason": reason}, numbers)

    async def close(self) -> None:
        """Holds nothing."""

    async def _user_turn(self, talk: list[Message], speak: Callable[[Talk], Awaitable[str | None]]) -> str:
        """Lets the user speak; returns why it does not, or ''."""
        try:
            said = await speak(talk)
        except OutOfTokens:
            return "budget"
        if said is None:
            return "script"
        if self.stop in said:
            return "stop"
        talk.append({"role": "user", "content": said})
        return ""

    def _user(self, task: Task, model: Model) -> Callable[[Talk], Awaitable[str | None]]:
        """Returns who is asked what the user says next."""
        if self.user == "script":
            lines = iter(self._script(task.payload))

            async def read(talk: Talk) -> str | None:
                return next(lines, None)

            return read
        persona: Message = {"role": "user", "content": self._persona(task.payload)}

        async def act(talk: Talk) -> str:
            chat = [persona, *swapped(talk)]
            if self.user == "endpoint":
                return (await self._endpoint(chat)).strip()
            return (await model(chat, USER, trained=False, max_tokens=self.user_max_tokens)).text.strip()

        return act

    def _script(self, payload: Mapping[str, Any]) -> list[str]:
        lines = payload.get(self.turns)
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise EpisodeError(
                f"the problem has no list of texts `{self.turns}`", hint=f"its columns are {', '.join(payload)}"
            )
        return lines

    def _persona(self, payload: Mapping[str, Any]) -> str:
        try:
            return self.persona.format_map({"stop": self.stop, **payload})
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            raise EpisodeError(
                f"`persona` cannot be filled in: {type(error).__name__}: {error}",
                hint=f"columns of the problem: {', '.join(payload) or 'none'}",
            ) from error

    async def _endpoint(self, chat: list[Message]) -> str:
        """Returns what another model says; asks again where it is busy or not there.

        Raises:
            EpisodeError: it does not answer, or answers nonsense.
        """
        import aiohttp

        if self.key_env is not None and not os.environ.get(self.key_env):
            raise EpisodeError(
                f"the environment variable `{self.key_env}` is not set", hint="see `environment.key_env`"
            )
        headers = {"Authorization": f"Bearer {os.environ[self.key_env]}"} if self.key_env else {}
        body = {"model": self.model, "messages": chat, "max_tokens": self.user_max_tokens}
        trouble = ""
        for attempt in range(_RETRIES):
            await asyncio.sleep(attempt * _RETRY_AFTER_S)
            try:
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.timeout_s), trust_env=True) as client,
                    client.post(f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers) as answer,
                ):
                    text = await answer.text()
                    if answer.status == 200:
                        return _said(text)
            except (aiohttp.ClientError, TimeoutError) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            trouble = f"status {answer.status}: {text[:200]}"
            if answer.status < 500 and answer.status != 429:
                break
        raise EpisodeError(f"the user's endpoint `{self.url}` gives no answer: {trouble}", hint="see `environment.url`")


def swapped(talk: Talk) -> list[Message]:
    """Returns a talk as its user sees it: what the user said is its own, and the assistant speaks to it."""
    other = {"user": "assistant", "assistant": "user"}
    return [
        {"role": other[message["role"]], "content": text_of(message)} for message in talk if message["role"] in other
    ]


def _said(text: str) -> str:
    try:
        said = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EpisodeError(f"the user's endpoint answers what is no chat completion: {text[:200]}") from error
    if not isinstance(said, str):
        raise EpisodeError("the user's endpoint answers without a text")
    return said
