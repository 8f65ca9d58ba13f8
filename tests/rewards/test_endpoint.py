"""An endpoint over real HTTP: what is sent, and what each kind of answer becomes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rollcli.errors import RewardError
from rollcli.rewards.asking import Question
from rollcli.rewards.endpoint import MOST_BYTES, Endpoint, url_problem
from tests.rewards.endpoints import Server, served

QUESTION = Question([{"role": "user", "content": "72?"}], 16, 0.5)


def ask(server: Server, *, key_env: str | None = None, **extra: Any) -> str:
    async def main() -> str:
        endpoint = Endpoint(server.url, "big-judge", key_env, extra)
        try:
            return await asyncio.wait_for(endpoint.complete(QUESTION), 30)
        finally:
            await endpoint._session.close()

    return asyncio.run(main())


def test_what_is_sent_and_what_comes(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with served() as server:
        assert ask(server, key_env="JUDGE_KEY", max_tokens=None, max_completion_tokens=7) == server.reply
        assert ask(server) == server.reply
        first, second = server.bodies
        assert server.keys == ["Bearer secret", None]
    assert first == {
        "model": "big-judge", "messages": QUESTION.messages, "temperature": 0.5, "max_completion_tokens": 7
    }  # fmt: skip
    assert second["max_tokens"] == 16


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"{", "no chat completion"),
        (b"[]", "no chat completion"),
        (b'{"choices": []}', "no chat completion"),
        (b'{"choices": [{"message": {"content": null}}]}', "without text"),
        (b'{"choices": [' + b" " * MOST_BYTES, "sends more than"),
        (json.dumps({"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]}).encode(), "was cut"),
    ],
)
def test_what_is_no_finished_answer(raw, what):
    with served() as server:
        server.raw = raw
        with pytest.raises(RewardError, match=what):
            ask(server)


def test_http_errors_and_nobody_there_may_be_tried_again():
    with served() as server:
        server.failures = 1
        with pytest.raises(ConnectionError, match="HTTP status 500"):
            ask(server)
    with pytest.raises(ConnectionError, match="not to be reached"):
        ask(server)


def test_a_key_that_is_not_set(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with served() as server, pytest.raises(RewardError, match="`NO_SUCH_KEY`"):
        ask(server, key_env="NO_SUCH_KEY")


@pytest.mark.parametrize("url", ["localhost:80", "http://", "ftp://host/v1", "http://h:99999/v1", "v1", ""])
def test_what_is_no_url(url):
    assert "is not a URL" in url_problem(url)


def test_a_password_does_not_belong_into_a_recipe():
    problem = url_problem("https://me:secret@host/v1")
    assert "key_env" in problem and "secret" not in problem
    assert url_problem("https://host:8000/v1") is None
