"""Talks with a user who is a script, the policy itself, or a model behind a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rollcli.data.carriers import Task
from rollcli.engines.base import SamplingParams
from rollcli.environments.base import Reply
from rollcli.environments.chat_server import ChatServer, Session
from rollcli.environments.dialogue import Dialogue, swapped
from rollcli.rewards.base import RewardResult
from tests.environments.episodes import episode, texts
from tests.rollout.doubles import Model


def problem(opening: str = "hi", **payload: Any) -> Task:
    messages = [{"role": "user", "content": opening}] if opening else []
    return Task("t", 0, [{"role": "system", "content": "S"}, *messages], payload, seed=5)


def ended(trajectory: Any) -> str:
    return next(name for name, value in trajectory.metrics.items() if name.startswith("ended_") and value)


def test_a_script_is_read_to_its_end_and_rewards_see_the_whole_talk():
    asked = []

    async def score(config: Any, fields: dict) -> list:
        asked.append(fields)
        return [RewardResult(1.0)]

    [done] = episode(Dialogue(), Model("a.", "b.", "c."), problem(turns=["more", "and"]), score)
    assert texts([done]) == ["Shi>a.more>b.and>c."] and done.metrics["turns"] == 3.0 and ended(done) == "ended_script"
    assert [message["content"] for message in asked[0]["messages"]] == ["S", "hi", "a", "more", "b", "and"]
    assert asked[0]["response"] == "c" and asked[0]["done_reason"] == "script"


def test_a_script_opens_a_talk_that_nothing_else_does_and_most_turns_are_kept():
    [done] = episode(Dialogue(max_turns=2), Model("a.", "b."), problem("", turns=["one", "two", "three"]))
    assert texts([done]) == ["Sone>a.two>b."] and ended(done) == "ended_max_turns"


def test_the_policy_plays_its_own_user_untrained_and_with_roles_swapped():
    model = Model("a.", "why.", "b.", "thanks[DONE].")
    [done] = episode(Dialogue("policy", persona="be {goal} {stop}"), model, problem(goal="curt"))
    assert texts([done]) == ["Shi>a.why>b."] and ended(done) == "ended_stop" and done.agent == ""
    seen = ["".join(map(chr, request.prompt)) for request in model.requests]
    assert seen[1] == "be curt [DONE]hia>" and seen[3] == "be curt [DONE]hia>why.b>", "its tokens go on"
    assert model.requests[1].sampling.max_tokens == 200 and done.response_tokens == 4


def test_a_simulated_user_may_open_the_talk():
    model = Model("help.", "a.", "[DONE].")
    [done] = episode(Dialogue("policy", persona="P"), model, problem(""))
    assert texts([done]) == ["Shelp>a."]
    [failed] = episode(Dialogue("policy", persona="P"), Model("[DONE]."), problem(""))
    assert "ended the talk before it began (`stop`)" in failed.error


def test_who_may_say_no_more_ends_the_talk_with_what_was_said():
    for model, said in ((Model("abc.", "u.", "d"), "Shi>abc.u>d"), (Model("abcd.", "u.", "x."), "Shi>abcd.")):
        [done] = episode(Dialogue("policy", persona="P"), model, problem(), sampling=SamplingParams(max_tokens=5))
        assert done.usable and ended(done) == "ended_budget" and texts([done])[0] == said
    [cut] = episode(Dialogue(), Model("abcdef"), problem(turns=["more"]), sampling=SamplingParams(max_tokens=5))
    assert (cut.stop_reason, ended(cut)) == ("length", "ended_budget")


@pytest.mark.parametrize(
    ("options", "payload", "message"),
    [
        ({}, {}, "no list of texts `turns`"),
        ({}, {"turns": "one"}, "no list of texts"),
        ({"user": "policy"}, {}, "KeyError: 'goal'"),
        ({"user": "policy", "persona": "{"}, {}, "ValueError"),
    ],
)
def test_a_problem_without_what_the_user_needs(options, payload, message):
    [failed] = episode(Dialogue(**options), Model("a."), problem(**payload))
    assert failed.error_kind == "environment" and message in failed.error


@pytest.fixture(scope="module")
def server():
    server = ChatServer()
    server.start()
    yield server
    server.close()


def test_another_model_plays_the_user(server, monkeypatch):
    asked = []

    async def model(messages: list, agent: str = "", **options: Any) -> Reply:
        asked.append((messages, options["max_tokens"]))
        return Reply(["next ", "[DONE] bye"][len(asked) - 1], "stop", 1)

    monkeypatch.setenv("USER_KEY", server.admit(Session(model)))
    user = Dialogue("endpoint", persona="P", url=server.url, model="policy", key_env="USER_KEY")
    [done] = episode(user, Model("a.", "b."), problem())
    assert texts([done]) == ["Shi>a.next>b."] and ended(done) == "ended_stop"
    assert asked[0] == (
        [{"role": "user", "content": "P"}, *swapped(problem().messages), {"role": "user", "content": "a"}],
        256,
    )

    monkeypatch.setenv("USER_KEY", "sk-wrong")
    [failed] = episode(user, Model("a."), problem())
    assert failed.error_kind == "environment" and "gives no answer: status 401" in failed.error
    monkeypatch.delenv("USER_KEY")
    [failed] = episode(user, Model("a."), problem())
    assert "`USER_KEY` is not set" in failed.error


def test_an_endpoint_that_is_down_or_answers_nonsense(monkeypatch):
    monkeypatch.setattr("rollcli.environments.dialogue._RETRY_AFTER_S", 0.0)
    calls = []

    async def main(body: bytes) -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            calls.append(head)
            status = b"503 Busy" if len(calls) == 1 else b"200 OK"
            writer.write(
                b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(body), body)
            )
            await writer.drain()
            writer.close()

        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        try:
            return await Dialogue("endpoint", url=url, model="m")._endpoint([])
        finally:
            listening.close()

    good = json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode()
    assert asyncio.run(main(good)) == "yes" and len(calls) == 2, "asked again after 503"
    for nonsense, message in ((b"<html>", "no chat completion"), (good.replace(b'"yes"', b"null"), "without a text")):
        with pytest.raises(Exception, match=message):
            asyncio.run(main(nonsense))
    [failed] = episode(
        Dialogue("endpoint", persona="P", url="http://127.0.0.1:9/v1", model="m"), Model("a."), problem()
    )
    assert "gives no answer: ClientConnectorError" in failed.error


def test_options_without_sense_are_named():
    assert {key for key, _ in Dialogue("endpoint", max_turns=0, stop="", timeout_s=0.0).problems()} == {
        "max_turns", "stop", "timeout_s", "url", "model",
    }  # fmt: skip
    assert list(Dialogue("endpoint", url="http://x/v1", model="m").problems()) == []
