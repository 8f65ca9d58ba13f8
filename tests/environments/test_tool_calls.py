"""Calls as Hermes and Qwen write them; what is malformed stays text."""

import pytest

from rollcli.environments.tool_calls import ToolCall, parse_tool_calls


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_text_and_calls_are_told_apart_in_order():
    text = "I look.\n" + call('{"name": "a", "arguments": {"x": [1]}}') + call('{"name": "b"}')
    assert parse_tool_calls(text) == ("I look.", [ToolCall("a", {"x": [1]}), ToolCall("b", {})])


@pytest.mark.parametrize(
    "body", ["{", "[1]", '{"arguments": {}}', '{"name": 3}', '{"name": "a", "arguments": "x"}', "not json"]
)
def test_a_malformed_call_leaves_the_text_as_it_is(body):
    text = f"  first {call(body)} "
    assert parse_tool_calls(text) == (text, [])


def test_a_call_that_was_only_thought_of_is_none():
    text = f"<think>{call(chr(123) + chr(125))}</think>\nNo."
    assert parse_tool_calls(text) == (text, [])
    assert parse_tool_calls(" plain\n") == (" plain\n", [])
