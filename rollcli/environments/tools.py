"""What a tool is: a plain function that the model may call, with a JSON schema made from its signature.

    def population(city: str, year: int = 2020) -> str:
        \"\"\"Looks up how many people live in a city.\"\"\"

What it returns is shown to the model, text as it is and anything else as JSON; so is an error of `REFUSALS` that it
raises, for the model may have asked for the impossible, and any other is a fault of the tool and fails the episode. It
runs in the environment's process, in a thread, and is trusted: only `python` runs what a model wrote, in the sandbox.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from rollcli.errors import PluginError, RollError
from rollcli.registry import resolve
from rollcli.suggest import did_you_mean

BUILTIN = {"python": "rollcli.environments.interpreter:Interpreter"}
"""Tools by name; a class is made anew for each episode."""

_TYPES: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,),
}  # fmt: skip


REFUSALS = (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What a tool may raise to tell the model that a call cannot be served."""


class CallFailed(Exception):
    """A call that was made and did not do what it should; the message is shown to the model."""


@dataclass(frozen=True)
class Tool:
    """A function, and what the model is told of it.

    Attributes:
        function: what is called, with arguments by name.
        schema: `name`, `description`, and `parameters` as a JSON schema.
    """

    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the model calls it."""
        return self.schema["name"]

    def complaint(self, arguments: Mapping[str, Any]) -> str:
        """Returns what is wrong with the arguments of a call, or nothing."""
        known = self.schema["parameters"]["properties"]
        for name in self.schema["parameters"]["required"]:
            if name not in arguments:
                return f'the call of "{self.name}" lacks the argument "{name}".'
        for name, value in arguments.items():
            if name not in known:
                meant = did_you_mean(name, known)
                also = f' Did you mean "{meant}"?' if meant else f" It takes: {', '.join(known) or 'none'}."
                return f'"{self.name}" takes no argument "{name}".{also}'
            if not _fits(value, known[name]):
                return f'argument "{name}" of "{self.name}" must be {_worded(known[name])}, is {_shown(value)}.'
        return ""

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Calls the function, and returns what the model is shown.

        Raises:
            CallFailed: the function refused, or returned what is no JSON.
        """
        try:
            result = self.function(**arguments)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except RollError:  # no sandbox, or a broken one: not the model's fault
            raise
        except REFUSALS as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from error


def load(name: str, folder: Path | None = None) -> Callable[..., Any]:
    """Returns the function or class that a tool's name stands for.

    Raises:
        PluginError: there is none, or its signature makes no schema.
    """
    function = resolve("tools", name, folder)
    if not callable(function):
        raise PluginError(f"tool `{name}` is no function", hint="a tool is a plain function with arguments by name")
    if not inspect.isclass(function):
        describe(function)
    return function


def describe(function: Callable[..., Any]) -> Tool:
    """Returns a function with its schema: name, first paragraph of its docstring, and arguments with their types.

    Raises:
        PluginError: it is asynchronous, or has an argument that no JSON by name can stand for.
    """
    name = getattr(function, "__name__", None) or getattr(function, "name", type(function).__name__)
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(called):
        raise PluginError(f"tool `{name}` is async", hint="write it as a plain function; it runs in a thread")
    try:
        hints = typing.get_type_hints(called)
    except NameError as error:
        raise PluginError(f"tool `{name}`: {error}", hint="import what its annotations name") from error
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PluginError(
                f"tool `{name}` takes `{parameter}`", hint="give it arguments with names, neither `/` nor `*` nor `**`"
            )
        properties[parameter.name] = _schema(hints.get(parameter.name, Any), f"tool `{name}`, `{parameter.name}`")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    doc = inspect.cleandoc(getattr(called, "__doc__", None) or "").partition("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(function, {"name": name, "description": doc, "parameters": parameters})


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return {}
    if origin in (Union, types.UnionType):
        members = [_schema(each, where) for each in arguments if each is not type(None)]
        return members[0] if len(members) == 1 else {"anyOf": members}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin not in _TYPES:
        raise PluginError(
            f"{where}: the type {hint} has no JSON", hint="use str, int, float, bool, list, dict or Literal"
        )
    inner = {"items": _schema(arguments[0], where)} if origin is list and arguments else {}
    return {"type": _TYPES[origin], **inner}


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "type" not in schema:
        return True
    expected = _PYTHON[schema["type"]]
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        return False
    return all(_fits(each, schema["items"]) for each in value) if "items" in schema else True


def _worded(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_worded, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(json.dumps, schema['enum']))}"
    items = f", each item {_worded(schema['items'])}" if "items" in schema else ""
    return f"{'an' if schema['type'][0] in 'aio' else 'a'} {schema['type']}{items}" if "type" in schema else "anything"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
