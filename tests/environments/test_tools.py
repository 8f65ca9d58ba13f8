"""Schemas made of signatures, and what a call's arguments are checked for."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from rollcli.environments import tools
from rollcli.environments.interpreter import Interpreter
from rollcli.environments.tools import CallFailed, describe, load
from rollcli.errors import EngineError, PluginError


def weather(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    near: list[float] | None = None,
    more: dict | None = None,
    x=None,
) -> dict:
    """Tells the weather
    of a city.

    Not told to the model.
    """
    if city == "Atlantis":
        raise LookupError("no such city")
    if city == "object":
        return {"is": object()}
    if city == "broken":
        raise EngineError("it broke")
    if city == "bug":
        raise AttributeError("a fault")
    return {"city": city, "days": days}


SCHEMA = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "near": {"type": "array", "items": {"type": "number"}},
            "more": {"type": "object"},
            "x": {},
        },
        "required": ["city"],
    },
}


def test_the_schema_of_a_function_is_its_signature() -> None:
    assert describe(weather).schema == SCHEMA
    python = describe(Interpreter()).schema
    assert python["name"] == "python" and python["parameters"]["properties"] == {"code": {"type": "string"}}
    assert python["description"].startswith("Runs Python code") and "Raises" not in python["description"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"city": "Rome"}, ""),
        ({"city": "Rome", "near": [1, 2.5], "x": None, "days": 3, "unit": "F", "more": {"a": 1}}, ""),
        ({}, 'the call of "weather" lacks the argument "city".'),
        ({"city": "Rome", "dys": 2}, '"weather" takes no argument "dys". Did you mean "days"?'),
        ({"city": 3}, 'argument "city" of "weather" must be a string, is 3.'),
        ({"city": "Rome", "days": True}, 'argument "days" of "weather" must be an integer, is true.'),
        ({"city": "Rome", "days": 1.5}, 'argument "days" of "weather" must be an integer, is 1.5.'),
        ({"city": "Rome", "unit": "K"}, 'argument "unit" of "weather" must be one of "C", "F", is "K".'),
        ({"city": "R", "near": ["a"]}, 'argument "near" of "weather" must be an array, each item a number, is ["a"].'),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], complaint: str) -> None:
    assert describe(weather).complaint(arguments) == complaint


def test_results_are_text_and_refusals_are_told() -> None:
    tool = describe(weather)
    assert tool.call({"city": "Köln"}) == '{"city": "Köln", "days": 1}'
    assert describe(repr_of).call({"value": 3}) == "3"
    with pytest.raises(CallFailed, match=r"^LookupError: no such city$"):
        tool.call({"city": "Atlantis"})
    with pytest.raises(CallFailed, match="not JSON serializable"):
        tool.call({"city": "object"})
    with pytest.raises(EngineError):
        tool.call({"city": "broken"})
    with pytest.raises(AttributeError):
        tool.call({"city": "bug"})


def repr_of(value: int | str) -> str:
    return repr(value)


def test_unions_take_each_of_their_types() -> None:
    tool = describe(repr_of)
    assert tool.complaint({"value": "a"}) == tool.complaint({"value": 1}) == ""
    assert tool.complaint({"value": 1.5}).endswith("must be an integer or a string, is 1.5.")


async def later(text: str) -> str: ...
def anything(**options: Any) -> str: ...
def at(when: complex) -> str: ...
def unknown(when: NoSuchType) -> str: ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "message"),
    [(later, "is async"), (anything, r"takes `\*\*options"), (at, "complex.* has no JSON"), (unknown, "NoSuchType")],
)
def test_what_cannot_be_called_by_name_is_refused(function: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        describe(function)
    assert caught.value.hint


def test_tools_are_found_as_other_plugins_are(tmp_path) -> None:
    (tmp_path / "mine.py").write_text('def add(a: int, b: int) -> int:\n    "Adds."\n    return a + b\nnumber = 3\n')
    assert describe(load("./mine.py:add", tmp_path)).call({"a": 1, "b": 2}) == "3"
    assert load("python") is Interpreter and list(tools.BUILTIN) == ["python"]
    with pytest.raises(PluginError, match=r"unknown tool `pyton`.*did you mean `python`"):
        load("pyton")
    with pytest.raises(PluginError, match="is no function"):
        load("./mine.py:number", tmp_path)
