"""A recipe as plain values again: every field, defaults included, loadable as a recipe."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from rollcli import registry
from rollcli.config.build import OPTIONS


def to_values(instance: Any, folder: Path | None = None) -> Any:
    """Returns dataclasses as mappings, plug-ins with their `name` first; relative plug-in files become absolute."""
    if is_dataclass(instance) and not isinstance(instance, type):
        values: dict[str, Any] = {}
        members = [member for member in fields(instance) if member.init]
        if "name" not in {member.name for member in members} and hasattr(instance, "name"):
            values["name"] = registry.absolute(instance.name, folder)
        for member in members:
            value = to_values(getattr(instance, member.name), folder)
            named = "names" in member.metadata and isinstance(value, str)
            values[member.name] = registry.absolute(value, folder) if named else value
        return values
    if isinstance(instance, dict):
        return {key: to_values(value, folder) for key, value in instance.items()}
    if isinstance(instance, (list, tuple)):
        return [to_values(item, folder) for item in instance]
    if isinstance(instance, (str, int, float, bool)) or instance is None:
        return instance
    return {"name": registry.absolute(instance.name, folder), **getattr(instance, OPTIONS, {})}


class _Dumper(yaml.SafeDumper):
    """Writes what every YAML reader reads back equal, also one that takes `1e5` for a number, as OmegaConf does."""

    def ignore_aliases(self, data: Any) -> bool:
        """A recipe is for people: the same value twice is written twice."""
        return True


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    """Writes floats so that YAML readers agree they are floats: `1.0e-06`, never `1e-06`."""
    text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    if "e" in text and "." not in text.split("e")[0]:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "'" if _NUMBER.fullmatch(value) else '"' if _BREAK.search(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


_NUMBER = re.compile(r"[-+.\d_]+([eE][-+]?\d+)?")
_BREAK = re.compile("[\x85\u2028\u2029]")
_Dumper.add_representer(float, _float)
_Dumper.add_representer(str, _text)


def to_yaml(values: Any) -> str:
    """Returns plain values as a recipe that reads back equal: floats, texts like "null", `${…}` in texts."""
    return yaml.dump(_escaped(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _escaped(value: Any) -> Any:
    """Writes `${` in texts as `\\${`, backslashes before it doubled, so that it is not taken for an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
