"""A conversation with tools: calls, results, errors that say what was wrong, and the answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollcli.config.load import load_recipe
from rollcli.data.carriers import Task
from rollcli.environments.blocking import perform
from rollcli.environments.tool import ToolUse
from rollcli.errors import ConfigError, PluginError

TASK = Task("t", 0, [{"role": "user", "content": "What is 6 * 7?"}])
MINE = """
def population(city: str) -> int:
    "Looks up how many people live in a city."
    return {"Rome": 2755309}[city]
"""


def call(name: str = "python", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def start(task: Task = TASK, **options) -> tuple[ToolUse, list]:
    world = ToolUse(**options)
    assert not list(world.problems())
    return world, asyncio.run(perform(world, "reset", task))


def shown(world: ToolUse, response: str) -> str:
    result = asyncio.run(perform(world, "step", response))
    assert not result.done and result.reward in (0.0, world.malformed_reward)
    [message] = result.messages
    assert message["role"] == world.role
    return message["content"]


def test_a_conversation() -> None:
    world, opened = start()
    assert opened[1:] == TASK.messages and opened[0]["role"] == "system"
    told = opened[0]["content"]
    [line] = [line for line in told.splitlines() if line.startswith('{"type"')]
    assert json.loads(line)["function"]["name"] == "python" and "<tool_call>" in told
    assert shown(world, "I compute.\n" + call(code="x = 6 * 7\nx")) == "42"
    assert shown(world, call(code="print(x + 1)")) == "43"
    assert shown(world, call(code="1 / 0")).endswith("ZeroDivisionError: division by zero")
    assert shown(world, call(cod="1")) == 'Error: the call of "python" lacks the argument "code".'
    result = asyncio.run(perform(world, "step", r"It is \boxed{42}."))
    assert result.done and not result.messages
    assert result.metrics == {"turns": 5, "calls": 3, "failed_calls": 1, "malformed_calls": 1, "answered": 1}
    assert result.fields == {**result.metrics, "done_reason": "answered"}


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("<tool_call>\n{\n</tool_call>", "not valid JSON"),
        ("<tool_call>\n", "is not closed"),
        (call("pyton", code="1"), 'there is no function "pyton". Did you mean "python"?'),
        (call("search", code="1"), 'there is no function "search". There is: python.'),
        (call(code=3), 'argument "code" of "python" must be a string, is 3'),
        (call(code="1") * 2, "2 calls in one turn; make one"),
        (call(code="1") + "<tool_call>oh</tool_call>", "call 2: what stands in <tool_call> is not valid JSON"),
    ],
)
def test_a_malformed_call_is_an_error_turn_that_says_why(response: str, why: str) -> None:
    world, _ = start(malformed_reward=-0.25)
    result = asyncio.run(perform(world, "step", response))
    assert not result.done and result.reward == -0.25
    assert result.messages[0]["content"].startswith("Error: ") and why in result.messages[0]["content"]
    assert result.metrics == {"turns": 1, "calls": 0, "failed_calls": 0, "malformed_calls": 1, "answered": 0}


def test_the_last_turn_ends_the_episode_whatever_it_is() -> None:
    for last, malformed in ((call(code="1"), 0), ("<tool_call>", 1)):
        world, _ = start(max_turns=2)
        shown(world, call(code="1"))
        result = asyncio.run(perform(world, "step", last))
        assert result.done and not result.messages and result.fields["done_reason"] == "max_turns"
        assert (result.metrics["calls"], result.metrics["malformed_calls"]) == (1, malformed)


def test_long_results_keep_beginning_and_end() -> None:
    world, _ = start(output_chars=10)
    assert shown(world, call(code="print('a' * 100 + 'b' * 100)")) == (
        "aaaaa\n[… 190 of 200 characters left out …]\nbbbbb"
    )
    assert shown(world, call(code="'a' * 8")) == "'aaaaaaaa'"


def test_fenced_blocks() -> None:
    world, opened = start(format="fenced", role="user")
    assert "```python" in opened[0]["content"] and "<tool_call>" not in opened[0]["content"]
    assert shown(world, "So:\n```python\n6 * 7\n```\n") == "42"
    assert (
        shown(world, "```python\n1\n```\n```py\n2\n```")
        == "Error: 2 calls in one turn; make one, and wait for its result."
    )
    assert "is not closed" in shown(world, "```python\n1\n")
    assert asyncio.run(perform(world, "step", "<tool_call> of 42")).done


def test_tools_of_ones_own_beside_python_in_a_system_message_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    task = Task("t", 0, [{"role": "system", "content": "Be brief."}, *TASK.messages])
    world, opened = start(task, tools=["python", f"{tmp_path}/mine.py:population"])
    assert [message["role"] for message in opened] == ["system", "user"]
    assert opened[0]["content"].startswith("Be brief.\n\n") and "how many people live" in opened[0]["content"]
    assert shown(world, call("population", city="Rome")) == "2755309"
    assert shown(world, call("population", city="Atlantis")) == "KeyError: 'Atlantis'"
    _, [told, _] = start(tools=[f"{tmp_path}/mine.py:population"], instruction="Here: {tools}")
    assert told["content"].startswith('Here: {"type": "function"') and "python" not in told["content"]


def test_two_tools_of_one_name() -> None:
    with pytest.raises(PluginError, match="two tools have one name: `python`, `python`"):
        start(tools=["python", "python"])


def test_options_without_sense_are_located(tmp_path: Path) -> None:
    assert {key for key, _ in ToolUse(max_turns=0, timeout_s=-1, malformed_reward=float("nan")).problems()} == {
        "max_turns", "timeout_s", "malformed_reward",
    }  # fmt: skip
    assert ("tools", "must name one; without tools the environment is `single_turn`") in ToolUse(tools=[]).problems()
    (tmp_path / "mine.py").write_text(MINE + "\ndef bad(*many): ...\n")
    recipe = tmp_path / "r.yaml"
    text = """steps: 1
model: {{path: "embedded:sums"}}
tasks:
  - name: t
    source: sums
    environment: {{name: tool, format: {format}, tools: [{tools}]}}
    rewards: [{{name: math}}]
"""
    for given, message in {
        "pyton": "unknown name `pyton`; known: python",
        "./mine.py:bad": r"takes `\*many`",
        "./mine.py:none": "has no `none`",
        "./mien.py:population": "plug-in file `mien.py` not found",
    }.items():
        recipe.write_text(text.format(format="tool_call", tools=given))
        with pytest.raises(ConfigError, match=message) as caught:
            load_recipe(str(recipe))
        assert caught.value.problems[0].line == 6
    recipe.write_text(text.format(format="fenced", tools="./mine.py:population"))
    with pytest.raises(ConfigError, match="calls Python only"):
        load_recipe(str(recipe))
    recipe.write_text(text.format(format="tool_call", tools="python, './mine.py:population'"))
    environment = load_recipe(str(recipe)).recipe.tasks[0].environment
    assert environment.tools == ["python", f"{tmp_path}/mine.py:population"], "workers start in another folder"
