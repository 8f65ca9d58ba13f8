"""Agents with programs of their own, against a real server and real processes: what they ask becomes trajectories."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rollcli.config.build import build_recipe
from rollcli.data.carriers import Task
from rollcli.data.templates import ChatFormat
from rollcli.engines.base import SamplingParams
from rollcli.engines.character_tokenizer import character_tokenizer
from rollcli.environments.agent import Agent, result_of
from rollcli.environments.base import StepResult
from rollcli.errors import ConfigError, EpisodeError
from rollcli.rewards.base import RewardResult
from tests.environments.episodes import episode, texts
from tests.rollout.doubles import Model

AGENT = """
import json, os, sys, urllib.request

def post(messages, model="policy", **more):
    body = {"model": model, "messages": messages, "temperature": 0, **more}
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(request))["choices"][0]

def result(**values):
    with open(os.environ["ROLL_RESULT_FILE"], "w") as file:
        json.dump(values, file)

task = json.load(sys.stdin)
assert task == json.load(open(os.environ["ROLL_TASK_FILE"]))
chat = task["messages"]
"""


def problem(**payload: Any) -> Task:
    return Task("t", 3, [{"role": "user", "content": "q"}], payload, seed=7)


def run(tmp_path: Path, program: str, model: Any, task: Task | None = None, **changes: Any) -> list:
    """Has a program play; returns the trajectories."""
    path = tmp_path / "agent.py"
    path.write_text(AGENT + program)
    options = changes.pop("options", {})
    return episode(Agent(command=[sys.executable, str(path)], **options), model, task or problem(), **changes)


TWO_TURNS = """
first = post(chat)["message"]
chat += [{**first, "refusal": None, "content": [{"type": "text", "text": first["content"]}]}]
chat += [{"role": "user", "content": task["payload"]["more"]}]
print("thinking"); print(post(chat)["message"]["content"])
result(reward=0.5, success=1.0, metrics={"calls": 2}, tests=3)
"""


def test_a_program_written_against_the_protocol_is_trained_on_its_own_calls(tmp_path):
    asked = []

    async def score(config: Any, fields: dict) -> list:
        asked.append(fields)
        return [RewardResult(fields["success"])]

    [done] = run(tmp_path, TWO_TURNS, Model("ab.", "c."), problem(more="on"), score=score)
    assert done.usable, done.error
    assert texts([done]) == ["q>ab.on>c."] and done.turns == [(2, 5), (8, 10)]
    assert (done.reward, done.turn_rewards, done.accuracy) == (0.5, [0.0, 0.5], 1.0)
    assert done.metrics == {"calls": 2.0} and asked[0]["tests"] == 3 and asked[0]["output"] == "thinking\nc\n"
    assert [(each["role"], each.get("turn")) for each in done.chat] == [
        ("user", None), ("assistant", 0), ("user", None), ("assistant", 1),
    ]  # fmt: skip


def test_words_that_were_rewritten_begin_a_trajectory_of_their_own(tmp_path):
    program = """
said = post(chat)["message"]["content"]
post([*chat, {"role": "assistant", "content": said.upper()}, {"role": "user", "content": "+"}])
result(reward=1)
"""
    parts = run(tmp_path, program, Model("ab.", "c."))
    assert texts(parts) == ["q>ab.", "qAB+>c."] and [each.reward for each in parts] == [1.0, 1.0]


def test_names_are_agents_with_rewards_of_their_own_and_some_are_not_trained(tmp_path):
    program = """
post(chat, "policy/solver"); post(chat, "policy/critic"); post(chat, "policy/user"); post(chat, "gpt-4o")
result(reward={"solver": 1, "critic": -1, "policy": 0.25})
"""
    options = {"models": ["gpt-4o"], "untrained": ["user"]}
    parts = run(tmp_path, program, Model("a.", "b.", "c.", "d."), options=options)
    assert [(each.agent, each.reward) for each in parts] == [("solver", 1.0), ("critic", -1.0), ("", 0.25)]
    assert texts(parts) == ["q>a.", "q>b.", "q>d."]


def test_a_program_that_crashes_fails_its_episode_with_the_end_of_what_it_said(tmp_path):
    [failed] = run(tmp_path, 'post(chat)\nprint("x" * 9000, file=sys.stderr)\nraise KeyError("gone")', Model("a."))
    assert failed.error_kind == "environment" and "ended with exit code 1: …" in failed.error
    assert failed.error.endswith("KeyError: 'gone'") and len(failed.error) < 1200
    [failed] = run(tmp_path, "os.kill(os.getpid(), 9)", Model())
    assert "signal SIGKILL, and nothing on standard error" in failed.error
    [failed] = episode(Agent(command=["/no/such/program"]), Model(), problem())
    assert "`/no/such/program` cannot be started: No such file" in failed.error


@pytest.mark.parametrize(("text", "message"), [("[1]", "is list, not an object"), ("{", "is no JSON")])
def test_a_result_that_is_none(tmp_path, text, message):
    program = f'post(chat)\nopen(os.environ["ROLL_RESULT_FILE"], "w").write("{text}")'
    [failed] = run(tmp_path, program, Model("a."))
    assert failed.error_kind == "environment" and message in failed.error


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_that_hangs_ends_with_all_it_started_at_the_episodes_limit(tmp_path):
    program = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
post(chat)
child.wait()
"""
    [failed] = run(tmp_path, program, Model("a."), timeout_s=1.5)
    assert failed.error_kind == "timeout"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    ends = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < ends:
        os.sched_yield()
    assert not any(map(alive, pids))


def test_an_agent_that_fails_for_lack_of_tokens_ends_its_episode_as_cut(tmp_path):
    program = """
while True:
    chat += [post(chat)["message"], {"role": "user", "content": "+"}]
"""
    [done] = run(tmp_path, program, Model("abcd.", "efghi."), sampling=SamplingParams(max_tokens=10))
    assert done.usable and len(done.turns) == 2 and done.reward == 0.0
    [failed] = run(tmp_path, program, Model("abcd."), max_prompt_tokens=1)
    assert failed.error_kind == "prompt_too_long"


def called(function: Any, model: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list:
    monkeypatch.setattr("tests.environments.test_agent.played", function, raising=False)
    return episode(Agent(agent=f"{__name__}:played"), model, problem(more="x"), **changes)


def say(url: str, key: str, **body: Any) -> Any:
    data = json.dumps({"messages": [{"role": "user", "content": "q"}], **body}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", data, {"Authorization": f"Bearer {key}"})
    return json.load(urllib.request.urlopen(request, timeout=20))


def test_functions_plain_and_async_may_block_and_return_a_reward(monkeypatch):
    def plain(task: dict, url: str, key: str) -> float:
        assert (task["payload"], task["id"], task["seed"]) == ({"more": "x"}, "t/3", 7)
        return len(say(url, key)["choices"][0]["message"]["content"])

    async def waiting(task: dict, url: str, key: str) -> dict:
        await asyncio.to_thread(say, url, key)
        return {"reward": 2, "success": 1.0}

    assert [each.reward for each in called(plain, Model("abc."), monkeypatch)] == [3.0]
    [done] = called(waiting, Model("abc."), monkeypatch)
    assert (done.reward, done.accuracy) == (2.0, 1.0)

    def broken(task: dict, url: str, key: str) -> None:
        say(url, key)
        raise ValueError("in the agent")

    [failed] = called(broken, Model("a."), monkeypatch)
    assert failed.error == "ValueError: in the agent"


TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_tools_are_shown_by_the_template_and_a_call_goes_on_with_its_result(monkeypatch):
    chat = ChatFormat(character_tokenizer(), TEMPLATE)

    async def model(request: Any) -> Any:
        said = [CALL, "two"][len(asked)] + "<|end|>"
        asked.append(chat.raw_text(request.prompt))
        ids = chat.tokenizer(said, add_special_tokens=False)["input_ids"]
        from rollcli.engines.base import Completion

        return Completion(request.id, *([[*ids]] + [[0] * len(ids)] * 2), "stop")

    def agent(task: dict, url: str, key: str) -> float:
        choice = say(url, key, tools=TOOLS)["choices"][0]
        call = choice["message"]["tool_calls"][0]
        assert choice["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"]) == {"a": 1}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        messages = [{"role": "user", "content": "q"}, choice["message"], result]
        return float(say(url, key, tools=TOOLS, messages=messages)["choices"][0]["message"]["content"] == "two")

    asked: list[str] = []
    [done] = called(agent, model, monkeypatch, format=chat, sampling=SamplingParams(max_tokens=500))
    assert done.error is None and done.reward == 1.0 and len(done.turns) == 2
    assert asked[0].startswith('<|system|>[{"type": "function"') and asked[0].endswith("<|user|>q<|end|><|assistant|>")
    assert asked[1] == f"{asked[0]}{CALL}<|end|><|user|>2<|end|><|assistant|>"


def test_a_template_without_a_place_for_tools_says_so(monkeypatch):
    heard = []

    def agent(task: dict, url: str, key: str) -> None:
        try:
            say(url, key, tools=TOOLS)
        except urllib.error.HTTPError as error:
            heard.append((error.code, error.headers["x-should-retry"], json.load(error)["error"]["message"]))
            raise

    [failed] = called(agent, Model(), monkeypatch, format=ChatFormat(character_tokenizer()))
    assert heard == [(500, "false", "the model's chat template has no place for tools")]
    assert failed.error_kind == "environment" and "no place for tools" in failed.error


def test_the_package_of_openai_is_served(monkeypatch):
    openai = pytest.importorskip("openai")

    def agent(task: dict, url: str, key: str) -> float:
        client = openai.OpenAI(base_url=url, api_key=key)
        messages = [{"role": "user", "content": "q"}]
        pieces = client.chat.completions.create(model="policy", messages=messages, stream=True)
        said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "+"}]
        answer = client.chat.completions.create(model="policy", messages=messages, temperature=0.1)
        messages += [answer.choices[0].message, {"role": "user", "content": "+"}]
        assert answer.usage.completion_tokens == 2 and answer.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="said all 5 tokens"):
            client.chat.completions.create(model="policy", messages=messages)
        assert [model.id for model in client.models.list()] == ["policy"]
        return 1.0

    [done] = called(agent, Model("ab.", "c."), monkeypatch, sampling=SamplingParams(max_tokens=5))
    assert done.error is None and texts([done]) == ["q>ab.+>c."] and done.reward == 1.0


def test_what_an_agent_may_return():
    assert result_of(None) == StepResult(done=True) and result_of(2) == StepResult(done=True, reward=2)
    given = StepResult(reward=3.0)
    assert result_of(given) is given
    assert result_of({"metrics": {"m": 1}, "a": 2}) == StepResult([], True, 0.0, {"a": 2}, {"m": 1})
    for wrong in ("won", True, [1], {1: 2}):
        with pytest.raises(EpisodeError, match="an agent returned"):
            result_of(wrong)


def test_a_payload_that_is_no_json_says_so():
    [failed] = episode(Agent(command=["true"]), Model(), problem(image=b"png"))
    assert "cannot be given to an agent as JSON" in failed.error


def recipe(folder: Path, **options: Any) -> Any:
    task = {
        "name": "t",
        "source": "seeds",
        "rewards": [{"name": "success"}],
        "environment": {"name": "agent", **options},
    }
    values = {"model": {"path": "embedded:sums"}, "steps": 1, "tasks": [task], "algorithm": "grpo"}
    return build_recipe(values, {}, folder).tasks[0].environment


def test_options_are_checked_and_a_file_is_found_beside_the_recipe(tmp_path):
    (tmp_path / "mine.py").write_text("def play(task, base_url, api_key): ...")
    assert recipe(tmp_path, agent="./mine.py:play").agent == f"{tmp_path / 'mine.py'}:play"
    for options, message in (
        ({}, "give one of"),
        ({"agent": "./mine.py:play", "command": ["x"]}, "give one of"),
        ({"agent": "./other.py:play"}, "not found"),
        ({"agent": "mine"}, "must be `./file.py:function`"),
        ({"agent": "./mine.py:plays"}, "did you mean `play`"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe(tmp_path, **options)
