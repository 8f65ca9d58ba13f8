"""Calls of tools as models of the Hermes and Qwen families write them.

<tool_call>
{"name": "search", "arguments": {"query": "roll"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and its arguments by name."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Returns what stands outside of the calls, and the calls; of a malformed one the whole text, and no call.

    >>> parse_tool_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [ToolCall(name='add', arguments={'a': 1})])
    """
    # What a model thinks of calling, it does not call.
    thought, mark, spoken = text.rpartition("</think>")
    calls = []
    for written in _CALL.findall(spoken):
        try:
            call = json.loads(written)
        except ValueError:
            return text, []
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return text, []
        calls.append(ToolCall(call["name"], arguments))
    return (f"{thought}{mark}{_CALL.sub('', spoken)}".strip() if calls else text), calls
