"""One chat as tokens: opened, answered, grown; what cannot go on says so."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollcli.config.schema import TaskConfig
from rollcli.data.stream import derive_seed
from rollcli.engines.base import Completion, SamplingParams
from rollcli.rollout.border import EpisodeFailure
from rollcli.rollout.conversation import Conversation, EpisodeContext
from rollcli.rollout.states import Census
from tests.rollout.doubles import Format, Model, task


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def talk(model: Any, *, context: int = 60, budget: int = 20, agent: str = "", number: int = 0) -> Conversation:
    surroundings = EpisodeContext(
        TaskConfig("t", None), Format(), SamplingParams(budget, stop=("#",)), 50, context, 9.0, model, None, Census()
    )
    return Conversation(task(4), 2, surroundings, agent, number)


def test_a_chat_is_its_prompts_and_answers_in_order():
    model = Model("ab.", "c.")
    chat = talk(model)

    async def main() -> None:
        chat.open([user("q")])
        first = await chat.turn(20, "here")
        assert (first.text, first.stop_reason, first.tokens) == ("ab", "stop", 3)
        assert chat.history == [user("q"), {"role": "assistant", "content": "ab"}]
        assert chat.extend([user("more")])
        await chat.turn(17, stop=("!",))

    asyncio.run(main())
    done = chat.trajectory()
    assert "".join(map(chr, done.tokens)) == "q>ab.more>c."
    assert done.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert done.turns == [(2, 5), (10, 12)] and done.state_keys[0] == "here" and len(done.state_keys) == 2
    assert chat.fields()["response"] == "c" and chat.fields()["prompt"] == "q\nmore"
    assert model.requests[1].sampling.stop == ("#", "!") and model.requests[1].sampling.max_tokens == 17


def test_draws_are_of_the_sample_and_turn_and_of_the_agent_where_there_are_several():
    for agent, number, parts in (("", 0, (2, 0)), ("second", 0, (2, "second", 0, 0)), ("", 1, (2, "", 1, 0))):
        model = Model("a.")
        chat = talk(model, agent=agent, number=number)
        chat.open([user("q")])
        asyncio.run(chat.turn(5))
        assert model.requests[0].seed == derive_seed(task(4).seed, *parts)
        assert model.requests[0].id == "/".join(("t/4", *map(str, parts)))


def test_a_prompt_is_held_against_what_the_budget_leaves_of_the_context():
    with pytest.raises(EpisodeFailure, match="prompt has 11 tokens, 10 are allowed"):
        talk(Model(), context=30).open([user("0123456789")])
    talk(Model(), context=31).open([user("0123456789")])


def test_no_room_ends_it_and_an_engines_failure_is_one():
    chat = talk(Model("abcdefghi."), context=22)
    chat.open([user("q")])
    asyncio.run(chat.turn(20))
    assert not chat.over and not chat.extend([user("0123456789")])
    assert chat.over and chat.stop_reason == "length" and chat.trajectory().stop_reason == "length"

    async def broken(request: Any) -> Completion:
        return Completion(request.id, np.zeros(0, np.int32), np.zeros(0), np.zeros(0, np.int32), "error", "no memory")

    chat = talk(broken)
    chat.open([user("q")])
    with pytest.raises(EpisodeFailure, match="no memory"):
        asyncio.run(chat.turn(20))


def test_a_chat_for_people_says_which_turns_were_sampled():
    model = Model("ab.", "c.")
    chat = talk(model)

    async def main() -> None:
        chat.open([user("q"), {"role": "assistant", "content": "given"}, user("r")])
        await chat.turn(20)
        assert chat.extend([{"role": "tool", "content": "2", "tool_call_id": "x"}])
        assert chat.history == chat.messages, "what was observed is not followed by the turn before it"
        await chat.turn(20)

    asyncio.run(main())
    assert [(each["role"], each["content"], each.get("turn")) for each in chat.chat()] == [
        ("user", "q", None), ("assistant", "given", None), ("user", "r", None), ("assistant", "ab", 0),
        ("tool", "2", None), ("assistant", "c", 1),
    ]  # fmt: skip
    assert chat.fields(0)["messages"] == chat.messages[:3] and chat.fields()["response"] == "c"
    assert chat.trajectory().chat == chat.chat()
