"""Episodes are told apart by their keys; requests reach the model, and its failures the agent."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from rollcli.environments.base import Reply
from rollcli.environments.chat_protocol import Refused, read_request
from rollcli.environments.chat_server import ChatServer, Session, shared_server
from rollcli.errors import OutOfTokens


@pytest.fixture(scope="module")
def server():
    server = ChatServer()
    server.start()
    yield server
    server.close()


class Model:
    """Gives the replies it is made with, or raises them; keeps what it was asked."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked: list[tuple] = []

    async def __call__(self, messages: list, agent: str = "", **options: Any) -> Reply:
        self.asked.append((messages, agent, options))
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return Reply(reply, "stop", len(reply), 5)


def fetch(url: str, token: str | None, body: Any = None) -> tuple[int, Any]:
    """Returns status and text of a request; POST where there is a body."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ask(**changes: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": "q"}], **changes}


def test_each_key_leads_to_its_own_episode(server):
    one, two = Model("one"), Model("two")
    tokens = [server.admit(Session(model)) for model in (one, two)]
    chat = f"{server.url}/chat/completions"
    said = [json.loads(fetch(chat, token, ask())[1])["choices"][0]["message"]["content"] for token in tokens]
    assert said == ["one", "two"] and len(one.asked) == len(two.asked) == 1
    server.dismiss(tokens[0])
    for token in (tokens[0], "sk-guess", "", None):
        status, text = fetch(chat, token, ask())
        assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
    assert fetch(f"{server.url}/models", None)[0] == 401


def test_models_requests_and_pieces(server):
    model = Model("hi", "there")
    token = server.admit(Session(model, ("gpt-4o",), ("user",)))
    listed = json.loads(fetch(f"{server.url}/models", token)[1])
    assert [each["id"] for each in listed["data"]] == ["policy", "gpt-4o"]
    chat = f"{server.url}/chat/completions"
    status, text = fetch(chat, token, ask(stream=True, model="policy/user", max_tokens=4, stop="x"))
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and lines[-1] == "[DONE]"
    assert json.loads(lines[0])["choices"][0]["delta"]["content"] == "hi"
    options = {"trained": False, "max_tokens": 4, "stop": ("x",), "tools": []}
    assert model.asked == [([{"role": "user", "content": "q"}], "user", options)]
    assert fetch(chat, token, b"{")[0] == 400 and fetch(chat, token, ask(model="gpt-4"))[0] == 404
    assert json.loads(fetch(chat, token, ask(model="gpt-4o"))[1])["usage"]["total_tokens"] == 10


def test_failures_of_the_model_reach_the_agent_and_are_kept(server):
    session = Session(Model(OutOfTokens("no room"), ValueError("template"), asyncio.CancelledError()))
    token = server.admit(session)
    answers = [fetch(f"{server.url}/chat/completions", token, ask()) for _ in range(3)]
    assert [status for status, _ in answers] == [400, 500, 503]
    assert [json.loads(text)["error"]["code"] for _, text in answers] == [
        "context_length_exceeded", "model_failed", "episode_over",
    ]  # fmt: skip
    assert session.spent.message == "no room" and str(session.fault) == "template"


def test_an_answer_nobody_waited_for_is_given_to_who_asks_again():
    release, asked = asyncio.Event(), []

    async def model(messages: list, agent: str = "", **options: Any) -> Reply:
        asked.append(messages)
        await release.wait()
        return Reply(f"answer {len(asked)}", "stop", 1)

    async def main() -> None:
        session = Session(model)
        hung_up = asyncio.ensure_future(session.answer(read_request(ask())))
        while not asked:
            await asyncio.sleep(0)
        hung_up.cancel()
        await asyncio.wait([hung_up])
        release.set()
        again = await session.answer(read_request(ask()))
        both = await asyncio.gather(*(session.answer(read_request(ask())) for _ in range(2)))
        assert (again.content, len(asked)) == ("answer 1", 3), "asked at once, each has an answer of its own"
        assert [answer.content for answer in both] == ["answer 2", "answer 3"]

    asyncio.run(main())


CALL = '<tool_call>{"name": "add", "arguments": {"b": 1, "a": 2}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_the_models_words_come_back_as_it_said_them():
    async def main() -> None:
        model = Model("four\n", CALL, "ok", "ok")
        session = Session(model)
        first = (await session.answer(read_request(ask()))).message
        called = (await session.answer(read_request(ask(tools=TOOLS)))).message
        call = dict(called["tool_calls"][0], index=0)
        call["function"] = {"name": "add", "arguments": '{"a":2,"b":1}'}
        kept = [
            {**first, "content": [{"type": "text", "text": "four"}], "refusal": None},
            {**called, "tool_calls": [call], "function_call": None},
        ]
        await session.answer(read_request(ask(messages=[*ask()["messages"], *kept])))
        assert model.asked[-1][0][1:] == [
            {"role": "assistant", "content": "four\n"}, {"role": "assistant", "content": CALL},
        ]  # fmt: skip
        rewritten = [{"role": "assistant", "content": "five"}]
        await session.answer(read_request(ask(messages=rewritten)))
        assert model.asked[-1][0] == rewritten

    asyncio.run(main())


def test_what_a_model_refuses_is_an_error_of_the_request():
    async def main() -> None:
        with pytest.raises(Refused) as caught:
            await Session(Model(OutOfTokens("spent"))).answer(read_request(ask()))
        assert caught.value.code == "context_length_exceeded"

    asyncio.run(main())


def test_a_process_has_one_server():
    assert shared_server() is shared_server() and shared_server().url.startswith("http://127.0.0.1:")
