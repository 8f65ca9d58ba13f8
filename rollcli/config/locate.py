"""Where each key of a YAML text stands, so that every problem can be shown at its place.

PyYAML gives the marks; values never come from it, since it reads `1e-6` as a string (OmegaConf reads the values).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import yaml

from rollcli.errors import ConfigError, Problem, RollError

AnyError = TypeVar("AnyError", bound=RollError)

Path = tuple[str | int, ...]

_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


@dataclass(frozen=True)
class Place:
    """Place of one key or list item. `line` and `column` count from 1; for an override `line` is its number."""

    source: str
    line: int
    column: int
    snippet: str
    length: int

    def problem(self, message: str, suggestion: str | None = None) -> Problem:
        """Returns `message` as a problem at this place."""
        return Problem(message, self.source, self.line, self.column, self.snippet, self.length, suggestion)


def located(error: AnyError, places: Mapping[Path, Place]) -> AnyError:
    """Returns the error with the place in the recipe of the key its message begins with, where that is known.

    Of a key that the recipe does not say, the nearest block above it counts.
    """
    match = re.match(r"`([\w.\[\]-]+)`", error.message)
    keys = re.findall(r"[^.\[\]]+", match[1]) if match else []
    path: Path = tuple(int(key) if key.isdigit() else key for key in keys)
    while path and path not in places:
        path = path[:-1]
    if not path:
        return error
    return type(error)(f"{places[path].problem('').location}: {error.message}", error.hint)


def places(text: str, source: str) -> dict[Path, Place]:
    """Returns the place of every key and list item of a YAML text, by path.

    Raises:
        ConfigError: the text is not YAML, is not a mapping, contains itself, or has a key twice or one that is no text.
    """
    lines = text.splitlines() or [""]
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError([yaml_problem(error, text, source)]) from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError([Problem("a recipe is a mapping of keys to values", source, 1, 1, lines[0])])
    found: dict[Path, Place] = {(): Place(source, 1, 1, lines[0], 1)}
    faults: list[Problem] = []
    open_nodes: list[yaml.Node] = []

    def place(node: yaml.Node) -> Place:
        line, column = node.start_mark.line, node.start_mark.column
        width = node.end_mark.column - column if node.end_mark.line == line else len(lines[line]) - column
        return Place(source, line + 1, column + 1, lines[line], max(width, 1))

    def walk(node: yaml.Node, path: Path) -> None:
        if any(node is outer for outer in open_nodes):
            faults.append(found[path].problem("an alias stands inside its own anchor"))
            return
        open_nodes.append(node)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                child = (*path, str(key.value))
                if key.tag not in _KEY_TAGS:
                    faults.append(place(key).problem("a key is text; put it in quotes"))
                elif child in found:
                    faults.append(place(key).problem(f"key `{key.value}` stands here a second time"))
                found[child] = place(key)
                walk(value, child)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                found[(*path, index)] = place(item)
                walk(item, (*path, index))
        open_nodes.pop()

    if root is not None:
        walk(root, ())
    if faults:
        raise ConfigError(faults)
    return found


def yaml_problem(error: yaml.YAMLError, text: str, source: str) -> Problem:
    """Returns what a YAML reader refused, at the place where it stopped."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, column = before.count("\n"), error.position - (before.rfind("\n") + 1)
        what = f"character #x{error.character:04x} is not allowed"
    else:
        mark = getattr(error, "problem_mark", None)
        line, column = (mark.line, mark.column) if mark else (0, 0)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
    lines = text.split("\n")
    snippet = lines[min(line, len(lines) - 1)]
    return Problem(f"not valid YAML: {what}", source, line + 1, column + 1, snippet)
