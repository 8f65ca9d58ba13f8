"""OpenAI's chat completions as plain data: requests read into what a `Model` takes, replies written out.

What is honored: `model`, `messages`, `max_tokens` or `max_completion_tokens`, `stop`, `tools`, `stream`. What would
change how tokens are drawn is the recipe's affair, for the trainer has to know it: `temperature`, `top_p`, `seed`, the
penalties and their like are passed over. What would make an answer another one than the agent asks for is refused with
status 400: `n` above 1, a `response_format` other than text, a `tool_choice` that forces a call, `logprobs`,
`logit_bias`, and images that are not in the request itself.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollcli.data.carriers import Message
from rollcli.environments.base import Reply
from rollcli.environments.tool_calls import ToolCall, parse_tool_calls

POLICY = "policy"
"""What the model is called; `policy/NAME` is the same model as the agent NAME."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Refused(Exception):
    """A request that is answered with an error; `code` and `status` are those that OpenAI uses."""

    def __init__(self, message: str, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.message, self.code, self.status = message, code, status

    def document(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks for; `asked_model` is the name it used."""

    asked_model: str
    agent: str
    messages: list[Message]
    max_tokens: int | None
    stop: tuple[str, ...]
    tools: list[dict[str, Any]]
    stream: bool
    with_usage: bool


def read_request(body: Any, also: tuple[str, ...] = ()) -> ChatRequest:
    """Returns a request as it is understood.

    Args:
        body: the JSON.
        also: names that stand for the model beside `policy`.

    Raises:
        Refused: it asks for what cannot be done, or makes no sense.
    """
    if not isinstance(body, Mapping):
        raise Refused("the request is not a JSON object")
    _check(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("`messages` must be a list of at least one message")
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise Refused(f"`max_tokens` must be a whole number above 0, is {most!r}")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refused("`stop` must be a text or a list of texts")
    name = body.get("model") or POLICY
    forbidden = body.get("tool_choice") == "none"
    options = body.get("stream_options")
    return ChatRequest(
        name,
        _agent(name, also),
        [_message(message, place) for place, message in enumerate(messages)],
        most,
        tuple(stop),
        [] if forbidden else list(body.get("tools") or []),
        bool(body.get("stream")),
        bool(isinstance(options, Mapping) and options.get("include_usage")),
    )


def _check(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise Refused("`n` must be 1: ask several times for several answers")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
        raise Refused("`response_format` must be text: answers are not constrained, describe the form in the prompt")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise Refused("`tool_choice` must be `auto` or `none`: answers are not constrained")
    for name in ("logprobs", "logit_bias", "functions"):
        if body.get(name):
            raise Refused(f"`{name}` is not supported", "unsupported_parameter")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) and "function" in tool for tool in tools):
        raise Refused("`tools` must be a list of functions")


def _agent(name: Any, also: tuple[str, ...]) -> str:
    if name == POLICY or name in also:
        return ""
    if isinstance(name, str) and name.startswith(f"{POLICY}/") and name != f"{POLICY}/":
        return name.removeprefix(f"{POLICY}/")
    known = ", ".join(f"`{each}`" for each in (POLICY, *also))
    raise Refused(
        f"there is no model {name!r}; there is {known}, and `{POLICY}/NAME` for an agent of that name; "
        "the environment's option `models` gives the model other names",
        "model_not_found", 404,
    )  # fmt: skip


def _message(raw: Any, place: int) -> Message:
    """Returns a message as chat templates take it: `role`, `content`, and what belongs to calls of tools."""
    role = raw.get("role") if isinstance(raw, Mapping) else None
    if role not in _ROLES:
        raise Refused(f"`messages[{place}].role` must be one of {', '.join(_ROLES)}, is {role!r}")
    message: Message = {"role": _ROLES[role], "content": _content(raw.get("content"), place)}
    if role == "assistant" and raw.get("tool_calls"):
        message["tool_calls"] = [_call(call, place) for call in raw["tool_calls"]]
    if role == "tool":
        message |= {key: raw[key] for key in ("tool_call_id", "name") if raw.get(key) is not None}
    return message


def _content(content: Any, place: int) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(f"`messages[{place}].content` must be a text or a list of parts")
    parts = [_part(part, place) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, place: int) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        address = part.get("image_url")
        address = address.get("url") if isinstance(address, Mapping) else address
        head, comma, data = str(address).partition(",")
        if head.startswith("data:") and head.endswith(";base64") and comma:
            try:
                return {"type": "image", "image": base64.b64decode(data, validate=True)}
            except binascii.Error as error:
                raise Refused(f"`messages[{place}]`: an image is no base64: {error}") from error
        raise Refused(f"`messages[{place}]`: an image must stand in the request, as `data:image/…;base64,…`")
    raise Refused(f"`messages[{place}]`: a part of type {kind!r} is not supported", "unsupported_value")


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(f"`messages[{place}].tool_calls` must hold calls of functions")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # Templates write arguments as JSON themselves.
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise Refused(f"`messages[{place}].tool_calls`: arguments are no JSON: {error}") from error
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


@dataclass(frozen=True)
class Answer:
    """A reply as an agent is given it: with calls of tools found in it where it was offered tools."""

    request: ChatRequest
    reply: Reply
    content: str
    calls: list[ToolCall]
    id: str

    @classmethod
    def of(cls, request: ChatRequest, reply: Reply) -> Answer:
        """Returns the answer to a request."""
        content, calls = parse_tool_calls(reply.text) if request.tools else (reply.text, [])
        return cls(request, reply, content, calls, f"chatcmpl-{uuid.uuid4().hex}")

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message; `content` is null where there is nothing but calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": f"call_{self.id[-16:]}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for number, call in enumerate(self.calls)
            ]
        return message

    @property
    def finish_reason(self) -> str:
        """`length` where the answer was cut, else `tool_calls` or `stop`."""
        return "length" if self.reply.stop_reason == "length" else "tool_calls" if self.calls else "stop"

    @property
    def usage(self) -> dict[str, int]:
        """Tokens, as they were sampled."""
        before, said = self.reply.prompt_tokens, self.reply.tokens
        return {"prompt_tokens": before, "completion_tokens": said, "total_tokens": before + said}

    def document(self) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""
        choice = {"index": 0, "message": self.message, "logprobs": None, "finish_reason": self.finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yields the pieces of a streamed answer: the whole message, why it ended, and the usage where asked for."""
        delta = self.message
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        head = self._head("chat.completion.chunk")
        yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
        yield {
            **head,
            "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.finish_reason}],
        }
        if self.request.with_usage:
            yield {**head, "choices": [], "usage": self.usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.request.asked_model}
