"""Episodes of three and of thirty turns against the chat template applied to the whole conversation, family by family.

The rule: what was sampled stays as sampled, and all around it is what the template says. So an episode's ids equal the
template's own wherever the template shows an answer as it was given. Where it does not (it trims answers, takes
thinking out of earlier turns, or its tokenizer joins an answer's first line breaks to the header's), the ids equal the
template's with each answer put back as it was sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollcli.config.schema import TaskConfig
from rollcli.data.carriers import Task, Trajectory
from rollcli.data.templates import ChatFormat
from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.environments.base import StepResult
from rollcli.environments.tool import ToolUse
from rollcli.errors import ModelNotFound
from rollcli.rollout.conversation import EpisodeContext
from rollcli.rollout.episode import Episode
from rollcli.rollout.states import Census
from tests.data.families import FAMILIES, chat_format

QUESTION = [{"role": "user", "content": "what is 1+1?"}]
SYSTEM = [{"role": "system", "content": "be brief"}]
PLAIN = ["embedded:sums", "embedded:smollm2", "llama3", "qwen2.5", "smollm2", "mistral"]
THINKING = ["qwen3", "deepseek-r1"]


def user(*texts: str) -> list[dict]:
    return [{"role": "user", "content": text} for text in texts]


def tool(*texts: str) -> list[dict]:
    return [{"role": "tool", "content": text} for text in texts]


@dataclass
class Script:
    """Shows what it is given, turn by turn."""

    opened: list
    observed: list

    def __post_init__(self) -> None:
        self.left = list(self.observed)

    async def reset(self, task: Task) -> list[dict]:
        return self.opened

    async def step(self, response: str) -> StepResult:
        return StepResult(self.left.pop(0)) if self.left else StepResult(done=True)

    async def close(self) -> None: ...


def get(name: str) -> ChatFormat:
    try:
        return chat_format(name)
    except ModelNotFound as error:
        pytest.skip(f"{error}; {error.hint}")


def play(
    chat: ChatFormat,
    opened: list,
    responses: list[str],
    observed: list[list],
    end: bool = True,
    reason: str = "stop",
    environment: Any = None,
) -> Trajectory:
    """Plays an episode; without `end` the model samples no end token, and `reason` says why its turns are over."""
    said = iter(responses)

    async def generate(request: GenerateRequest) -> Completion:
        ids = sampled(chat, next(said), end)
        count = len(ids)
        return Completion(request.id, ids, np.full(count, -0.5, np.float32), np.zeros(count, np.int32), reason)

    async def score(*_: Any) -> list:
        return []

    config = TaskConfig("t", None, [], environment or Script(opened, observed))
    context = EpisodeContext(config, chat, SamplingParams(max_tokens=10**5), 10**5, 10**6, 60.0, generate, score,
                             Census())  # fmt: skip

    async def main() -> Trajectory:
        [only] = await Episode(Task("t", 0, opened), 0, context).run()
        return only

    done = asyncio.run(main())
    assert done.error is None, done.error
    return done


def sampled(chat: ChatFormat, text: str, end: bool = True) -> np.ndarray:
    """The ids of an answer as a model samples them: its text from its first character on, and the end of its turn."""
    ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array(ids + [chat.tokenizer.eos_token_id] * end, np.int32)


def whole_chat(chat: ChatFormat, opened: list, responses: list[str], observed: list[list]) -> list[int]:
    """The tokenizer's own ids of the finished conversation, up to the end of its last answer."""
    messages = list(opened)
    for response, seen in zip(responses, [*observed, []], strict=True):
        messages += [{"role": "assistant", "content": response}, *seen]
    ids = chat.tokenizer.apply_chat_template(messages, tokenize=True)
    ids = list(ids if isinstance(ids, list) else ids["input_ids"])
    while ids[-1] not in chat.stop_token_ids:
        assert chat.tokenizer.decode(ids[-1:]).strip() == ""
        ids.pop()
    return ids


def check_mask(chat: ChatFormat, done: Trajectory, responses: list[str], end: bool = True) -> None:
    """Asserts that the loss is on what was sampled, end tokens included, and on nothing else."""
    expected = [sampled(chat, response, end).tolist() for response in responses]
    assert [done.tokens[start:stop].tolist() for start, stop in done.turns] == expected
    assert done.loss_mask.sum() == sum(map(len, expected))
    assert all(done.loss_mask[start:stop].all() for start, stop in done.turns)
    assert (done.versions == np.where(done.loss_mask, 0, -1)).all()


def with_answers(done: Trajectory, answers: list[np.ndarray]) -> list[int]:
    """The episode's ids with other answers in the places of the sampled ones."""
    ids, at = [], 0
    for (start, stop), answer in zip(done.turns, answers, strict=True):
        ids += [*done.tokens[at:start].tolist(), *answer.tolist()]
        at = stop
    return ids


def numbered(turns: int, response: str = "the answer is {}.\n\nso: {}") -> list[str]:
    return [response.replace("{}", str(turn)) for turn in range(turns)]


@pytest.mark.parametrize("turns", [3, 30])
@pytest.mark.parametrize("name", PLAIN)
def test_turn_by_turn_is_the_template_of_the_whole_chat(name: str, turns: int) -> None:
    """Every id: default system messages, headers, line breaks and end tokens included."""
    chat = get(name)
    responses, observed = numbered(turns), [user(f"seen {turn}\n") for turn in range(turns - 1)]
    for opened in [QUESTION] if name == "mistral" else [QUESTION, SYSTEM + QUESTION]:
        done = play(chat, opened, responses, observed)
        assert done.tokens.tolist() == whole_chat(chat, opened, responses, observed)
        assert len(done.turns) == turns and done.stop_reason == "stop"
        check_mask(chat, done, responses)


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "embedded:smollm2"])
def test_a_default_system_message_is_there_once(name: str) -> None:
    done = play(get(name), QUESTION, ["2", "3"], [user("sure?")])
    assert get(name).raw_text(done.tokens).count("<|im_start|>system\nYou are") == 1


@pytest.mark.parametrize("turns", [3, 30])
def test_thinking_of_an_episode_with_tools_is_the_template_of_the_whole_chat(turns: int) -> None:
    """Qwen3's template keeps the thinking of all turns since the user's last question: every id is equal."""
    chat = get("qwen3")
    responses = numbered(turns, "<think>\nadd {}\n</think>\n\nthe sum is {}")
    observed = [tool(f"seen {turn}") for turn in range(turns - 1)]
    done = play(chat, QUESTION, responses, observed)
    assert done.tokens.tolist() == whole_chat(chat, QUESTION, responses, observed)
    check_mask(chat, done, responses)


@pytest.mark.parametrize("turns", [3, 30])
@pytest.mark.parametrize("name", THINKING)
def test_thinking_stays_as_sampled_where_the_template_takes_it_out(name: str, turns: int) -> None:
    """All but the answers equals the template's; the template's own answers are those without their thinking."""
    chat = get(name)
    opens = "" if name == "deepseek-r1" else "<think>\n"  # DeepSeek-R1's template writes it, where a turn is opened
    responses = numbered(turns, opens + "add {}\n</think>\n\nthe sum is {}")
    observed = [user(f"seen {turn}") for turn in range(turns - 1)]
    done = play(chat, QUESTION, responses, observed)
    check_mask(chat, done, responses)
    text = chat.raw_text(done.tokens)
    assert all(response in text for response in responses) and text.count("<think>\n") == turns
    spoken = [sampled(chat, response.partition("</think>\n\n")[2]) for response in responses]
    if name == "qwen3":  # which shows the last turn's thinking
        assert with_answers(done, [*spoken[:-1], sampled(chat, responses[-1])]) == whole_chat(
            chat, QUESTION, responses, observed
        )
    else:
        # Opened turns go on with `<think>`, which finished ones lack, and line breaks stay after the thinking.
        spoken = [sampled(chat, "\n\n" + chat.text(ids)) for ids in spoken]
        think = sampled(chat, "<think>\n", end=False).tolist()
        ids, without = with_answers(done, spoken), []
        while ids:
            is_think = ids[: len(think)] == think
            without, ids = without + ids[:1] * (not is_think), ids[len(think) if is_think else 1 :]
        assert without == whole_chat(chat, QUESTION, responses, observed)


def test_a_user_who_speaks_after_tools_does_not_rewrite_the_past() -> None:
    """Qwen3's template takes the thinking out of the turns before; what was sampled stays, and the episode goes on."""
    chat = get("qwen3")
    responses = numbered(3, "<think>\nadd {}\n</think>\n\nthe sum is {}")
    done = play(chat, QUESTION, responses, [tool("seen 1"), user("seen 2")])
    text = chat.raw_text(done.tokens)
    assert text.endswith(f"{responses[1]}<|im_end|>\n<|im_start|>user\nseen 2<|im_end|>\n<|im_start|>assistant\n"
                         f"{responses[2]}<|im_end|>")  # fmt: skip
    check_mask(chat, done, responses)


@pytest.mark.parametrize("name", ["llama3", "qwen2.5", "smollm2", "qwen3", "deepseek-r1"])
def test_several_messages_follow_a_turn(name: str) -> None:
    """Two results of tools, of which Qwen's templates make one message of the user; then both kinds."""
    chat = get(name)
    assert chat.shows_tools
    responses, observed = ["sum\n", "and", "the answer is 7"], [tool("seen 1\n", "seen 2"), tool("3") + user("go on")]
    done = play(chat, QUESTION, responses, observed)
    shown = chat.raw_text(done.tokens).replace("<think>\n", "")
    expected = chat.raw_text(np.array(whole_chat(chat, QUESTION, responses, observed)))
    if name == "qwen3":
        expected = expected.replace("<think>\n\n</think>\n\n", "")  # which it adds to a last turn without any
    assert shown == (expected.replace("sum<|eot_id|>", "sum\n<|eot_id|>") if name == "llama3" else expected)
    check_mask(chat, done, responses)


def test_an_episode_with_a_real_tool() -> None:
    """Calls, an error turn and the answer, with what the sandbox gave back as Qwen2.5's template shows it."""
    chat, world = get("qwen2.5"), ToolUse()
    calls = ['<tool_call>\n{"name": "python", "arguments": {"code": "x = 6\\nx * 7"}}\n</tool_call>', "<tool_call>"]
    responses = [*calls, "the answer is 42"]
    opened = dataclasses.replace(world).reset(Task("t", 0, QUESTION))
    observed = [tool("42"), tool("Error: <tool_call> is not closed by </tool_call>.")]
    done = play(chat, QUESTION, responses, [], environment=world)
    assert done.tokens.tolist() == whole_chat(chat, opened, responses, observed)
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>" in chat.raw_text(done.tokens)
    assert done.metrics == {"turns": 3, "calls": 1, "failed_calls": 0, "malformed_calls": 1, "answered": 1}
    check_mask(chat, done, responses)


def test_a_template_without_tools_shows_them_as_the_users() -> None:
    """A template that refuses the role, and one that leaves such messages out."""
    chat = get("mistral")
    assert not chat.shows_tools
    assert np.array_equal(chat.between(QUESTION, tool("7")), chat.between(QUESTION, user("7")))
    silent = ChatFormat(chat.tokenizer, MISTRAL_WITHOUT_TOOLS)
    try:
        assert not silent.shows_tools
        assert silent.raw_text(silent.between(QUESTION, tool("7"))) == "[INST] 7 [/INST]"
    finally:
        chat.tokenizer.chat_template = FAMILIES["mistral"].template


MISTRAL_WITHOUT_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("name", [*PLAIN, *THINKING])
def test_an_answer_that_its_length_ends(name: str) -> None:
    """No end token is sampled, and none is written."""
    chat = get(name)
    done = play(chat, QUESTION, ["the answ"], [], end=False, reason="length")
    prompt = chat.prompt(QUESTION)
    assert done.tokens.tolist() == [*prompt.tolist(), *sampled(chat, "the answ", end=False).tolist()]
    assert done.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(done.tokens) - len(prompt))
    assert done.stop_reason == "length"


@pytest.mark.parametrize("name", PLAIN)
def test_a_turn_that_a_stop_word_ends_gets_its_end_token_unsampled(name: str) -> None:
    chat = get(name)
    responses, observed = ["the answer is", "so", "2"], [user("seen 1"), user("seen 2")]
    done = play(chat, QUESTION, responses, observed, end=False)
    assert [*done.tokens.tolist(), chat.tokenizer.eos_token_id] == whole_chat(chat, QUESTION, responses, observed)
    check_mask(chat, done, responses, end=False)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("answer", ["\n\n  the answer \n", "  so", "\n", ""])
def test_spaces_around_answers_stay_as_sampled(name: str, answer: str) -> None:
    """Around them every id is the template's; a template that does not trim gives the same text as well."""
    chat = get(name)
    responses, observed = [answer, answer, "the sum"], [user("seen 1"), user("seen 2")]
    done = play(chat, QUESTION, responses, observed)
    check_mask(chat, done, responses)
    plain = ["x", "x", "the sum"]
    expected = whole_chat(chat, QUESTION, plain, observed)
    assert with_answers(done, [sampled(chat, each) for each in plain]) == expected
    if name != "llama3":
        assert chat.raw_text(done.tokens) == chat.raw_text(np.array(whole_chat(chat, QUESTION, responses, observed)))
    else:
        trimmed = [sampled(chat, each.strip()) for each in responses]
        assert with_answers(done, trimmed) == whole_chat(chat, QUESTION, responses, observed)
