"""Chat completions of an OpenAI-compatible endpoint, such as vLLM, SGLang or a hosted service."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rollcli.errors import RewardError
from rollcli.rewards.asking import Question

if TYPE_CHECKING:
    import aiohttp

MOST_BYTES = 4 * 2**20
"""Of one response; a longer one is no verdict."""
_SHOWN = 200


def url_problem(url: str) -> str | None:
    """Returns what is wrong with an endpoint's URL, if anything."""
    try:
        parts = urlsplit(url)
        port_fits = parts.port != 0
    except ValueError as error:
        return f"`{url}` is not a URL: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_fits:
        return f"`{url}` is not a URL such as `http://localhost:8000/v1`"
    if parts.username or parts.password:
        return "holds a name or a password; put the key into an environment variable and name it with `key_env`"
    return None


class Endpoint:
    """One endpoint; connections are kept open between calls. Used from one event loop.

    Args:
        url: up to and without `/chat/completions`.
        model: name of the model there.
        key_env: environment variable that holds the key; None sends none.
        extra: keys of the request's body beside ours; null takes one of ours out.
    """

    def __init__(self, url: str, model: str, key_env: str | None, extra: Mapping[str, Any]) -> None:
        self.url = f"{url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        self.model, self.key_env, self.extra = model, key_env, dict(extra)
        self._session: aiohttp.ClientSession | None = None
        parts = urlsplit(self.url)
        self._proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)

    async def complete(self, question: Question) -> str:
        """Returns the model's answer.

        Raises:
            ConnectionError: the endpoint is not to be reached, or answers with an HTTP error.
            RewardError: the key's variable is not set, or what comes is no finished answer.
        """
        import aiohttp

        if self._session is None:
            # Every call has a limit of its own, whoever makes it; how many there are at once is the caller's, too.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
            )
        body = {
            "model": self.model,
            "messages": question.messages,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            **self.extra,
        }
        body = {key: value for key, value in body.items() if value is not None}
        try:
            async with self._session.post(
                self.url, json=body, headers=self._headers(), allow_redirects=False, proxy=self._proxy
            ) as response:
                text = await _read(response)
                status = response.status
        except aiohttp.ClientError as error:
            raise ConnectionError(f"`{self.url}` is not to be reached: {error or type(error).__name__}") from error
        if status != 200:
            raise ConnectionError(f"`{self.url}` answers with HTTP status {status}: {text[:_SHOWN].strip()}")
        return self._answer(text)

    def _headers(self) -> dict[str, str]:
        if self.key_env is None:
            return {}
        key = os.environ.get(self.key_env)
        if not key:
            raise RewardError(f"the environment variable `{self.key_env}`, which holds the endpoint's key, is not set")
        return {"Authorization": f"Bearer {key}"}

    def _answer(self, text: str) -> str:
        try:
            choice = json.loads(text)["choices"][0]
            answer, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise RewardError(f"`{self.url}` gives no chat completion: {text[:_SHOWN].strip()}") from None
        if not isinstance(answer, str):
            raise RewardError(f"`{self.url}` gives an answer without text")
        if reason == "length":
            raise RewardError("the answer was cut at `max_tokens`")
        return answer


async def _read(response: aiohttp.ClientResponse) -> str:
    received = bytearray()
    async for part in response.content.iter_any():
        received += part
        if len(received) > MOST_BYTES:
            raise RewardError(f"`{response.url}` sends more than {MOST_BYTES} bytes")
    return received.decode("utf-8", errors="replace")
