"""Where each key of a YAML text stands, so that every problem can be shown at its place.

PyYAML gives the marks; values never come from it, since it reads `1e-6` as a string (OmegaConf reads the values).
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from rollcli.errors import ConfigError, Problem

Path = tuple[str | int, ...]


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


def places(text: str, source: str) -> dict[Path, Place]:
    """Returns the place of every key and list item of a YAML text, by path.

    Raises:
        ConfigError: the text is not YAML, is not a mapping, or has a key twice.
    """
    lines = text.splitlines() or [""]
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line, column = (mark.line, mark.column) if mark else (0, 0)
        snippet = lines[min(line, len(lines) - 1)]
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError([Problem(f"not valid YAML: {what}", source, line + 1, column + 1, snippet)]) from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError([Problem("a recipe is a mapping of keys to values", source, 1, 1, lines[0])])
    found: dict[Path, Place] = {}
    doubled: list[Problem] = []

    def place(node: yaml.Node) -> Place:
        line, column = node.start_mark.line, node.start_mark.column
        width = node.end_mark.column - column if node.end_mark.line == line else len(lines[line]) - column
        return Place(source, line + 1, column + 1, lines[line], max(width, 1))

    def walk(node: yaml.Node, path: Path) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                child = (*path, str(key.value))
                if child in found:
                    doubled.append(place(key).problem(f"key `{key.value}` stands here a second time"))
                found[child] = place(key)
                walk(value, child)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                found[(*path, index)] = place(item)
                walk(item, (*path, index))

    if root is not None:
        walk(root, ())
    if doubled:
        raise ConfigError(doubled)
    return found
