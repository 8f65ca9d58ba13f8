"""Turns plain values into the schema's dataclasses and reports every problem at once, each at its place.

No value is converted silently: an integer may stand where a float is asked for, and nothing else changes type.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from rollcli import registry
from rollcli.config.locate import Path as KeyPath
from rollcli.config.locate import Place
from rollcli.config.schema import PIPELINES, Recipe
from rollcli.errors import ConfigError, PluginError, Problem
from rollcli.suggest import did_you_mean

BAD = object()
"""Stands for a value that does not fit; its problem is already recorded."""

OPTIONS = "_recipe_options"
"""Attribute in which a plug-in that is not a dataclass keeps the options it was made with, to be written down again."""


@dataclass
class Builder:
    """Collects problems while it builds; `places` says where each value came from."""

    places: Mapping[KeyPath, Place]
    folder: Path | None = None
    found: list[Problem] = field(default_factory=list)
    meant: dict[Problem, KeyPath] = field(default_factory=dict)
    """The key that each problem is about; of a misspelled one, what it was taken for."""
    failed: list[KeyPath] = field(default_factory=list)

    def report(self, path: KeyPath, message: str, suggestion: str | None = None) -> Any:
        """Records a problem at `path`, or at the nearest enclosing key that the user wrote."""
        self._record(path, f"`{dotted(path)}`: {message}" if path else message, suggestion, path)
        return self.fail(path)

    def fail(self, path: KeyPath) -> Any:
        """Notes that there is no value at `path`: nothing more is said about it."""
        self.failed.append(path)
        return BAD

    def _record(self, path: KeyPath, message: str, suggestion: str | None, about: KeyPath) -> None:
        at = path
        while at and at not in self.places:
            at = at[:-1]
        place = self.places.get(at)
        problem = place.problem(message, suggestion) if place else Problem(message, suggestion=suggestion)
        self.found.append(problem)
        self.meant[problem] = about

    def unknown(self, path: KeyPath, known: list[str], plugin: str | None = None) -> None:
        """Records an unknown key, of a plug-in where one was named."""
        key = str(path[-1])
        meant = did_you_mean(key, known)
        owner = f" of `{plugin}`" if plugin else ""
        listing = "" if meant else f"{owner}; known: {', '.join(known)}" if known else f"{owner}; it takes no options"
        about = (*path[:-1], meant) if meant else path[:-1]
        self._record(path, f"unknown key `{dotted(path)}`{listing}", meant, about)

    def dataclass(self, cls: type, value: Any, path: KeyPath, default: Any = None, plugin: str | None = None) -> Any:
        """Builds `cls` from a mapping; a field that fails falls back to its default so that the rest is checked.

        `default` is the block as it is where nothing is written: what a mapping leaves out is taken from it. `plugin`
        is the name that chose the class, which then is one of the block's keys.
        """
        if not isinstance(value, Mapping):
            return self.report(path, f"expected a block of keys, found {shown(value)}")
        members = {member.name: member for member in fields(cls) if member.init}
        for key in value:
            if key not in members and not (key == "name" and plugin is not None):
                self.unknown((*path, key), list(members), plugin)
        built: dict[str, Any] = {} if default is None else {name: getattr(default, name) for name in members}
        complete = True
        for name, member in members.items():
            if default is not None and name not in value:
                continue
            result = self.member(cls, member, value.get(name, MISSING), (*path, name), default)
            if result is MISSING or result is BAD:
                complete = complete and (member.default is not MISSING or member.default_factory is not MISSING)
            else:
                built[name] = result
        if not complete:
            return BAD
        instance = cls(**built)
        failed = tuple(self.failed)
        for where, message in instance.problems() if hasattr(instance, "problems") else ():
            at = (*path, *keys(where))
            # Where a default stands in for a value that failed, a check of it says nothing about the recipe.
            if not any(other[: len(at)] == at or at[: len(other)] == other for other in failed):
                self.report(at, message)
        return instance

    def member(self, cls: type, member: Field, value: Any, path: KeyPath, default: Any = None) -> Any:
        """Builds one field's value; MISSING means the default stands: `default`'s, or else the schema's."""
        if "plugin" in member.metadata:
            usual = member.metadata["default"]
            value = usual if value is MISSING else value
            if value is None:
                return self.report(path, "is required")
            if usual is not None and isinstance(value, Mapping) and "name" not in value:
                value = {"name": usual, **value}
            return self.plugin(member.metadata["plugin"], value, path)
        if value is MISSING:
            required = member.default is MISSING and member.default_factory is MISSING
            return self.report(path, "is required") if required else MISSING
        expected = hints(cls)[member.name]
        if is_dataclass(expected) and value is not BAD and member.default_factory is not MISSING:
            standing = member.default_factory() if default is None else getattr(default, member.name)
            return self.dataclass(expected, value, path, default=standing)
        result = self.value(expected, value, path)
        if isinstance(result, dict) and member.default_factory is not MISSING:
            # Mappings merge key by key, over the schema's default too.
            result = {**member.default_factory(), **result}
        if isinstance(result, list):
            items = [self.named(member, item, (*path, place)) for place, item in enumerate(result)]
            return BAD if any(item is BAD for item in items) else items
        return self.named(member, result, path)

    def named(self, member: Field, value: Any, path: KeyPath) -> Any:
        """Checks a value that is a registered name, or a target in a file, which becomes absolute; others are as is."""
        if not isinstance(value, str):
            return value
        if value and member.metadata.get("target"):
            try:
                value = registry.absolute(value, self.folder)
            except PluginError as error:
                return self.report(path, f"{error}; {error.hint}")
        kind = member.metadata.get("names")
        if kind and ":" not in value and value not in registry.names(kind):
            known = registry.names(kind)
            return self.report(path, f"unknown name `{value}`; known: {', '.join(known)}", did_you_mean(value, known))
        return value

    def plugin(self, kind: str, value: Any, path: KeyPath) -> Any:
        """Builds a plug-in's own class from `name` and its options."""
        block = {"name": value} if isinstance(value, str) else value
        if block is BAD or (isinstance(block, Mapping) and block.get("name") is BAD):
            return self.fail(path)
        if not isinstance(block, Mapping) or not isinstance(block.get("name"), str):
            return self.report(path, f"expected a name, or a block with `name`, found {shown(value)}")
        at = path if isinstance(value, str) else (*path, "name")
        try:
            target = registry.resolve(kind, block["name"], self.folder)
        except PluginError as error:
            return self.report(at, f"{error}; {error.hint}")
        if is_dataclass(target):
            instance = self.dataclass(target, block, path, plugin=block["name"])
        elif callable(target):
            instance = self.call(target, {k: v for k, v in block.items() if k != "name"}, path)
        else:
            return self.report(at, f"`{block['name']}` is neither a class nor a function")
        if instance is BAD:
            return BAD
        try:
            instance.name = block["name"]
        except AttributeError:
            return self.report(at, f"`{block['name']}` gives {instance!r}, which cannot be given a `name`")
        return instance

    def call(self, target: Callable, options: Mapping[str, Any], path: KeyPath) -> Any:
        """Builds a plug-in that is not a dataclass from the keyword arguments of its constructor."""
        if any(option is BAD for option in options.values()):
            return BAD
        parameters = inspect.signature(target).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            unknown = [key for key in options if key not in parameters]
            for key in unknown:
                self.unknown((*path, key), list(parameters))
            if unknown:
                return BAD
        named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        missing = [name for name, p in named.items() if p.default is p.empty and name not in options]
        if missing:
            return self.report(path, f"needs the option {' and '.join(f'`{name}`' for name in missing)}")
        try:
            instance = target(**options)
        except (TypeError, ValueError) as error:
            return self.report(path, str(error))
        if hasattr(instance, "__dict__"):
            setattr(instance, OPTIONS, dict(options))
        return instance

    def value(self, expected: Any, value: Any, path: KeyPath) -> Any:
        """Checks one value against a type hint."""
        if value is BAD:
            return self.fail(path)
        origin, arguments = get_origin(expected), get_args(expected)
        if origin in (Union, types.UnionType):
            return self.union(arguments, value, path)
        if expected is Any:
            return value
        if is_dataclass(expected):
            return self.dataclass(expected, value, path)
        if origin is list:
            if not isinstance(value, list):
                return self.report(path, f"expected a list, found {shown(value)}")
            items = [self.value(arguments[0], item, (*path, index)) for index, item in enumerate(value)]
            return BAD if any(item is BAD for item in items) else items
        if origin is dict:
            if not isinstance(value, Mapping):
                return self.report(path, f"expected a block of keys, found {shown(value)}")
            items = {key: self.value(arguments[1], item, (*path, key)) for key, item in value.items()}
            return BAD if any(item is BAD for item in items.values()) else items
        if origin is Literal:
            if value in arguments and type(value) is type(arguments[0]):
                return value
            choices = ", ".join(f"`{choice}`" for choice in arguments)
            return self.report(
                path, f"expected one of {choices}, found {shown(value)}", did_you_mean(str(value), arguments)
            )
        return self.scalar(expected, value, path)

    def union(self, members: tuple[Any, ...], value: Any, path: KeyPath) -> Any:
        """Checks a value against `A | B`: the first member whose kind fits decides."""
        if value is None and type(None) in members:
            return None
        concrete = [member for member in members if member is not type(None)]
        for member in concrete:
            kind = get_origin(member) or member
            if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
                return self.value(member, value, path)
        if len(concrete) > 1:
            return self.report(path, f"expected {' or '.join(map(article, concrete))}, found {shown(value)}")
        return self.value(concrete[0], value, path)

    def scalar(self, expected: type, value: Any, path: KeyPath) -> Any:
        """Checks a bool, int, float or str."""
        if expected is float and type(value) is int:
            return float(value)
        if type(value) is expected:
            return value if value == value else self.report(path, f"expected {article(expected)}, found `.nan`")
        hint = ""
        if value == "None":
            hint = " (write `null` for no value)"
        elif expected is str and isinstance(value, (bool, int, float, Mapping, list)):
            hint = f" (put it in quotes: {self.quoted(path)})"
        return self.report(path, f"expected {article(expected)}, found {shown(value)}{hint}")

    def quoted(self, path: KeyPath) -> str:
        """Returns how text is written that YAML reads as something else; the shell takes an override's outer quotes."""
        place = self.places.get(path)
        if place is None or place.source != "command line":
            return '"…"'
        key, _, text = place.snippet.partition("=")
        quotable = key == dotted(path) and not set(text) & set("'\"$`\\")
        return f"`\"{key}='{text}'\"`" if quotable else f"`\"{dotted(path)}='…'\"`"


@cache
def hints(cls: type) -> dict[str, Any]:
    """Returns the resolved type hints of a dataclass."""
    return typing.get_type_hints(cls)


def keys(where: str) -> KeyPath:
    """Returns `a.0.b` as a path."""
    return tuple(int(part) if part.isdigit() else part for part in where.split("."))


def dotted(path: KeyPath) -> str:
    """Returns a path as the user writes it: `tasks[0].source.name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def article(expected: Any) -> str:
    """Returns a type's name in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(expected) or {list: "a list", dict: "a block of keys"}.get(get_origin(expected), str(expected))


def shown(value: Any) -> str:
    """Returns a value as an error message shows it."""
    if isinstance(value, Mapping):
        return "a block of keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing (null)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty text"


def build_recipe(value: Mapping[str, Any], places: Mapping[KeyPath, Place], folder: Path | None = None) -> Recipe:
    """Builds the recipe of the pipeline that `value` names.

    Raises:
        ConfigError: with every problem found, in order of place.
    """
    builder = Builder(places, folder)
    name = value.get("pipeline", "rl")
    if not isinstance(name, str) or name not in PIPELINES:
        # The schema's own check of `pipeline` reports it; the rest is checked against what was meant.
        name = did_you_mean(str(name), PIPELINES) or "rl"
    recipe = builder.dataclass(PIPELINES[name], value, ())
    if builder.found:
        problems = in_order(builder.found)
        key = _explained(builder.meant[problem] for problem in problems)
        means = f" {key}` to see what it means" if key else "` to see all keys"
        raise ConfigError(problems, hint=f"run `roll config explain{means}")
    return recipe


def _explained(paths: Iterable[KeyPath]) -> str | None:
    """Returns the first of the keys, or of what holds it, that `roll config explain` knows, as it lists them.

    It has no `[0]`, which some shells take for a pattern.
    """
    from rollcli.config.explain import all_keys

    known = set(all_keys())
    for path in paths:
        for end in range(len(path), 0, -1):
            key = ".".join(part for part in path[:end] if isinstance(part, str))
            if key in known:
                return key
    return None


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Returns problems by place, those of overrides last."""
    return sorted(problems, key=lambda p: (p.source == "command line", p.source, p.line, p.column))
