"""What agents send, and what they are sent."""

import base64
import json

import pytest

from rollcli.environments.base import Reply
from rollcli.environments.chat_protocol import Answer, Refused, read_request

ASK = {"model": "policy", "messages": [{"role": "user", "content": "q"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def read(also=(), **changes):
    return read_request({**ASK, **changes}, also)


def test_messages_are_brought_to_one_form():
    messages = [
        {"role": "developer", "content": "be brief", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": []},
        {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]  # fmt: skip
    assert read(messages=messages).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
        {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]  # fmt: skip


def test_an_image_in_the_request_is_its_bytes():
    url = "data:image/png;base64," + base64.b64encode(b"png").decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    content = read(messages=[{"role": "user", "content": parts}]).messages[0]["content"]
    assert content == [{"type": "image", "image": b"png"}, {"type": "text", "text": "what?"}]


def test_options_that_are_honored_and_those_that_are_the_recipes():
    asked = read(max_tokens=3, stop="x", stream=True, temperature=0, top_p=0.1, seed=4, presence_penalty=2, user="u")
    assert (asked.max_tokens, asked.stop, asked.stream, asked.agent, asked.tools) == (3, ("x",), True, "", [])
    assert read(max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert read(stop=["a", "b"], tools=[TOOL]).stop == ("a", "b")
    assert read(tools=[TOOL], tool_choice="none").tools == [] and read(tools=[TOOL]).tools == [TOOL]


def test_a_model_is_an_agent():
    assert read(model="policy/solver").agent == "solver" and read(model="policy/a/b").agent == "a/b"
    assert read(also=("gpt-4o",), model="gpt-4o").agent == ""
    for name in ("gpt-4o", "policy/", "polcy/solver", 3):
        with pytest.raises(Refused, match="`policy/NAME`") as caught:
            read(model=name)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def shown(image):
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 2}, "`n` must be 1"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True}, "`logprobs` is not supported"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "at least one message"),
        ({"messages": [{"role": "robot", "content": ""}]}, r"messages\[0\].role"),
        ({"messages": ["hi"]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "a text or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        (shown({"url": "http://x"}), "an image must stand in the request"),
        (shown("data:a;base64,?"), "base64"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "calls of functions"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, "JSON"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop": 3}, "stop"),
        ({"tools": ["add"]}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_says_so(changes, message):
    with pytest.raises(Refused, match=message) as caught:
        read(**changes)
    assert caught.value.status == 400 and caught.value.document()["error"]["type"] == "invalid_request_error"


def test_a_request_that_is_no_object():
    with pytest.raises(Refused, match="not a JSON object"):
        read_request([1])


def test_an_answer_and_its_usage():
    answer = Answer.of(read(), Reply("four", "stop", 3, 10))
    document = answer.document()
    assert document["choices"][0]["message"] == {"role": "assistant", "content": "four"}
    assert document["choices"][0]["finish_reason"] == "stop" and document["object"] == "chat.completion"
    assert document["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    assert Answer.of(read(), Reply("fo", "length", 2)).finish_reason == "length"


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_calls_of_tools_are_found_only_where_tools_were_offered():
    plain, offered = (Answer.of(read(**more), Reply(CALL, "stop", 3)) for more in ({}, {"tools": [TOOL]}))
    assert plain.message == {"role": "assistant", "content": CALL} and plain.finish_reason == "stop"
    assert offered.message["content"] is None and offered.finish_reason == "tool_calls"
    [call] = offered.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and call["id"].startswith("call_")


def test_pieces_of_a_stream_add_up():
    asked = read(stream=True, tools=[TOOL], stream_options={"include_usage": True})
    message, end, usage = Answer.of(asked, Reply(f"so {CALL}", "stop", 3, 4)).chunks()
    assert message["choices"][0]["delta"]["content"] == "so"
    assert message["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 7
    json.dumps([message, end, usage])
