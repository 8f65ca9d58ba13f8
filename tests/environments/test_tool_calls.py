"""Calls as Hermes and Qwen write them, and as fenced blocks; what is malformed stays text, or is told."""

import pytest

from rollcli.environments.tool_calls import (
    MalformedCall,
    ToolCall,
    parse_tool_calls,
    read_python_blocks,
    read_tool_calls,
)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_text_and_calls_are_told_apart_in_order():
    text = "I look.\n" + call('{"name": "a", "arguments": {"x": [1]}}') + call('{"name": "b"}')
    assert parse_tool_calls(text) == ("I look.", [ToolCall("a", {"x": [1]}), ToolCall("b", {})])
    assert read_tool_calls(text) == [ToolCall("a", {"x": [1]}), ToolCall("b", {})]
    assert parse_tool_calls("<think>so</think>\nI look." + call('{"name": "b"}'))[0] == "<think>so</think>\nI look."


MALFORMED = {
    "{": "not valid JSON: Expecting property name",
    "[1]": "a call is a JSON object",
    '{"arguments": {}}': 'the text "name"',
    '{"name": 3}': 'the text "name"',
    '{"name": "a", "arguments": "x"}': '"arguments" must be a JSON object of arguments by name, not a str',
    "not json": "not valid JSON",
    "[" * 100_000: "nested too deeply",
    '{"name": ' + "9" * 5000 + "}": "not valid JSON",
}


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: body[:20])
def test_a_malformed_call_leaves_the_text_as_it_is_and_says_why(body):
    text = f"  first {call(body)} "
    assert parse_tool_calls(text) == (text, [])
    with pytest.raises(MalformedCall) as caught:
        read_tool_calls(text)
    assert MALFORMED[body] in str(caught.value) and len(str(caught.value)) < 200
    with pytest.raises(MalformedCall, match=r"^call 2: "):
        read_tool_calls(call('{"name": "a"}') + text)


@pytest.mark.parametrize(
    ("text", "why"),
    [("<tool_call>\n{}", "is not closed by </tool_call>"), ("{}</tool_call>", "</tool_call> without a <tool_call>")],
)
def test_marks_that_stand_alone(text, why):
    with pytest.raises(MalformedCall, match=why):
        read_tool_calls(text)
    assert parse_tool_calls(text) == (text, [])


def test_a_call_that_was_only_thought_of_is_none():
    text = f"<think>{call(chr(123) + chr(125))}</think>\nNo."
    assert parse_tool_calls(text) == (text, [])
    assert parse_tool_calls(" plain\n") == (" plain\n", [])
    assert read_python_blocks("<think>\n```python\n1\n```\n</think>\nNo.") == []


def test_blocks_of_python():
    text = "So:\n```python\nif a:\n    b\n```\nand\n```text\n```python is no opening here\n```\n  ```py\nc\n  ```\n"
    assert read_python_blocks(text) == ["if a:\n    b", "c"]
    assert read_python_blocks("```\nx\n```\n```rust\nx\n```\n```python x```") == []
    with pytest.raises(MalformedCall, match="```python block is not closed"):
        read_python_blocks("```python\n1")
    assert read_python_blocks("```json\n1") == []
    assert len(read_python_blocks("```python\n```\n" * 50_000)) == 50_000
