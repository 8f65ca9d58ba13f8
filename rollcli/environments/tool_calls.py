"""Calls of tools as models write them: as those of the Hermes and Qwen families do, or as fenced blocks of Python.

<tool_call>
{"name": "search", "arguments": {"query": "roll"}}
</tool_call>

What a model thinks of calling (before `</think>`) it does not call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FENCE = "```"
_PYTHON = ("python", "python3", "py")


class MalformedCall(ValueError):
    """A call that cannot be made; the message tells the model why."""


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and its arguments by name."""

    name: str
    arguments: dict[str, Any]


def read_tool_calls(text: str) -> list[ToolCall]:
    """Returns the calls of a turn, in order; takes time linear in the text.

    Raises:
        MalformedCall: one of them is not closed, is no JSON, or lacks what a call has.
    """
    calls = []
    before, *written = _spoken(text).split(OPEN)
    if CLOSE in before:
        raise MalformedCall(f"{CLOSE} without a {OPEN} before it.")
    for number, each in enumerate(written, 1):
        body, closed, _ = each.partition(CLOSE)
        which = f"call {number}: " if len(written) > 1 else ""
        if not closed:
            raise MalformedCall(f"{which}{OPEN} is not closed by {CLOSE}.")
        calls.append(_call(body.strip(), which))
    return calls


def _call(body: str, which: str) -> ToolCall:
    try:
        call = json.loads(body)
    except RecursionError:
        raise MalformedCall(f"{which}the JSON is nested too deeply.") from None
    except ValueError as error:
        raise MalformedCall(f"{which}what stands in {OPEN} is not valid JSON: {error}.") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedCall(f'{which}a call is a JSON object with the text "name" and the object "arguments".')
    if not isinstance(call.get("arguments", {}), dict):
        kind = type(call["arguments"]).__name__
        raise MalformedCall(f'{which}"arguments" must be a JSON object of arguments by name, not a {kind}.')
    return ToolCall(call["name"], call.get("arguments", {}))


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Returns what stands outside of the calls, and the calls; of a malformed one the whole text, and no call.

    >>> parse_tool_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [ToolCall(name='add', arguments={'a': 1})])
    """
    try:
        calls = read_tool_calls(text)
    except MalformedCall:
        return text, []
    spoken = _spoken(text)
    before, *written = spoken.split(OPEN)
    outside = text[: len(text) - len(spoken)] + before + "".join(each.partition(CLOSE)[2] for each in written)
    return (outside.strip() if calls else text), calls


def read_python_blocks(text: str) -> list[str]:
    """Returns the fenced blocks that say they are Python, in order; blocks of other labels are text.

    Raises:
        MalformedCall: one of them is not closed.
    """
    blocks: list[str] = []
    label: str | None = None
    lines: list[str] = []
    for line in _spoken(text).splitlines():
        mark = line.strip()
        if label is None and mark.startswith(_FENCE):
            label, lines = mark.strip("`").strip().lower(), []
            # One line that opens and closes, as in ```x```, is text.
            label = None if mark.count(_FENCE) > 1 else label
        elif mark == _FENCE:
            blocks += ["\n".join(lines)] if label in _PYTHON else []
            label = None
        else:
            lines.append(line)
    if label in _PYTHON:
        raise MalformedCall(f"the {_FENCE}{label} block is not closed by {_FENCE}.")
    return blocks


def _spoken(text: str) -> str:
    return text.rpartition("</think>")[2]
