"""A problem that the model works on with tools: it calls, is shown the result, and goes on until it answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from rollcli.config.schema import Problems, finite, positive
from rollcli.data.carriers import Message, Task
from rollcli.environments.base import StepResult
from rollcli.environments.interpreter import Interpreter
from rollcli.environments.tool_calls import MalformedCall, ToolCall, read_python_blocks, read_tool_calls
from rollcli.environments.tools import CallFailed, Tool, describe, load
from rollcli.errors import PluginError
from rollcli.suggest import did_you_mean

_CALLS = """You may call one of these functions in a turn:
<tools>
{tools}
</tools>

To call one, end your turn with its name and its arguments as JSON inside <tool_call></tool_call>:
<tool_call>
{{"name": "<function name>", "arguments": {{"<argument>": <value>}}}}
</tool_call>
You are then shown the result. A turn without a call is your final answer."""
_BLOCKS = """You may have Python code run: end your turn with one block
```python
<code>
```
You are then shown what it prints. A turn without such a block is your final answer."""
_KEPT = " Names that earlier code defined can be used, unless it failed."


@dataclass
class ToolUse:
    """The task's problem, its `messages`, with tools told in a system message.

    A turn is an answer, which ends the episode and is what rewards score, or one call. A call that cannot be made is
    answered by an error that says what is wrong with it. Each turn's metrics and fields hold `turns`, `calls` (made),
    `failed_calls` (of them, those that raised or ran into a limit), `malformed_calls` (not made) and `answered` (1 when
    the episode ended with an answer; the call of a last turn is not made, for nobody would see its result).
    """

    blocking = True

    tools: list[str] = field(default_factory=lambda: ["python"], metadata={"names": "tools", "target": True})
    """What may be called: `python`, which runs code in the sandbox, and functions of your own, `./mine.py:search`."""
    format: Literal["tool_call", "fenced"] = "tool_call"
    """How the model calls: JSON in `<tool_call>`, as Hermes and Qwen do, or a block of Python between ``` fences."""
    role: Literal["tool", "user"] = "tool"
    """Whose message a result is; a template without the role `tool` shows it as the user's."""
    instruction: str = ""
    """System message in place of the built-in one; `{tools}` in it stands for the functions, one JSON each line."""
    stateful: bool = True
    """Names that `python` defined in earlier calls can be used: code that succeeded runs again before the next."""
    max_turns: int = 8
    """Turns after which the episode ends, the answer's included."""
    timeout_s: float = 4.0
    """Seconds that one call of `python` may take, earlier code that runs again included."""
    memory_mib: int = 1024
    """Memory of one call of `python`."""
    output_chars: int = 2000
    """Most characters of a result that are shown; of a longer one the beginning and the end."""
    malformed_reward: float = 0.0
    """Reward of a turn with a call that cannot be made."""

    def __post_init__(self) -> None:
        self._counts = dict.fromkeys(("turns", "calls", "failed_calls", "malformed_calls"), 0)

    def problems(self) -> Problems:
        yield from positive(self, "max_turns", "timeout_s", "memory_mib", "output_chars")
        yield from finite(self, "malformed_reward")
        if not self.tools:
            yield "tools", "must name one; without tools the environment is `single_turn`"
        for place, name in enumerate(self.tools):
            try:
                load(name)
            except PluginError as error:
                yield f"tools.{place}", f"{error}; {error.hint}"
        if self.format == "fenced" and self.tools != ["python"]:
            yield "format", "`fenced` calls Python only; other tools need `tool_call`"

    def reset(self, task: Task) -> list[Message]:
        """Returns the problem, with the tools told in its system message.

        Raises:
            PluginError: a tool is not there, or two have one name.
        """
        functions = [load(name) for name in self.tools]
        made = [
            Interpreter(self.stateful, self.timeout_s, self.memory_mib) if function is Interpreter else function
            for function in functions
        ]
        described = list(map(describe, made))
        self._tools = {tool.name: tool for tool in described}
        if len(self._tools) < len(described):
            names = ", ".join(f"`{tool.name}`" for tool in described)
            raise PluginError(f"two tools have one name: {names}", hint="give the functions names of their own")
        told = {"role": "system", "content": self._told()}
        first, *rest = task.messages
        if first["role"] == "system":
            told["content"] = f"{first['content']}\n\n{told['content']}"
            return [told, *rest]
        return [told, first, *rest]

    def step(self, response: str) -> StepResult:
        """Makes the call of a turn, or takes it for the answer.

        Raises:
            SandboxUnavailable: `python` was called, and nothing here can confine a program.
        """
        self._counts["turns"] += 1
        is_last = self._counts["turns"] >= self.max_turns
        try:
            call = self._call(response)
        except MalformedCall as error:
            self._counts["malformed_calls"] += 1
            shown, reward = f"Error: {error}", self.malformed_reward
        else:
            if call is None:
                return self._result([], True, 0.0, answered=True)
            shown, reward = "" if is_last else self._made(*call), 0.0
        return self._result([] if is_last else [{"role": self.role, "content": shown}], is_last, reward)

    def close(self) -> None:
        """Holds nothing."""

    def _told(self) -> str:
        tools = "\n".join(json.dumps({"type": "function", "function": tool.schema}) for tool in self._tools.values())
        if self.instruction:
            return self.instruction.replace("{tools}", tools)
        if self.format == "fenced":
            return _BLOCKS + (_KEPT if self.stateful else "")
        return _CALLS.format(tools=tools) + (_KEPT if self.stateful and "python" in self._tools else "")

    def _call(self, response: str) -> tuple[Tool, dict] | None:
        """Returns the call of a turn, None where it has none."""
        if self.format == "fenced":
            calls = [ToolCall("python", {"code": block}) for block in read_python_blocks(response)]
        else:
            calls = read_tool_calls(response)
        if not calls:
            return None
        if len(calls) > 1:
            raise MalformedCall(f"{len(calls)} calls in one turn; make one, and wait for its result.")
        [call] = calls
        if call.name not in self._tools:
            meant = did_you_mean(call.name, self._tools)
            also = f'Did you mean "{meant}"?' if meant else f"There is: {', '.join(self._tools)}."
            raise MalformedCall(f'there is no function "{call.name[:60]}". {also}')
        if complaint := self._tools[call.name].complaint(call.arguments):
            raise MalformedCall(complaint)
        return self._tools[call.name], call.arguments

    def _made(self, tool: Tool, arguments: dict) -> str:
        """Makes a call, and returns what the model is shown."""
        self._counts["calls"] += 1
        try:
            text = tool.call(arguments)
        except CallFailed as error:
            self._counts["failed_calls"] += 1
            text = str(error)
        return _cut(text, self.output_chars)

    def _result(self, messages: list[Message], done: bool, reward: float, answered: bool = False) -> StepResult:
        numbers = {name: float(count) for name, count in self._counts.items()} | {"answered": float(answered)}
        reason = "answered" if answered else "max_turns" if done else ""
        return StepResult(messages, done, reward, {**numbers, "done_reason": reason}, numbers)


def _cut(text: str, most: int) -> str:
    """Returns a text of which the middle is left out when it is longer than `most` characters."""
    if len(text) <= most:
        return text
    tail = most // 2
    return f"{text[: most - tail]}\n[… {len(text) - most} of {len(text)} characters left out …]\n{text[-tail:]}"
