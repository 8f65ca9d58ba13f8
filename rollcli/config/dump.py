"""A recipe as plain values again: every field, defaults included, loadable as a recipe."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from rollcli import registry


def to_values(instance: Any, folder: Path | None = None) -> Any:
    """Returns dataclasses as mappings, plug-ins with their `name` first; relative plug-in files become absolute."""
    if is_dataclass(instance) and not isinstance(instance, type):
        values: dict[str, Any] = {}
        members = [member for member in fields(instance) if member.init]
        if "name" not in {member.name for member in members} and hasattr(instance, "name"):
            values["name"] = registry.absolute(instance.name, folder)
        for member in members:
            values[member.name] = to_values(getattr(instance, member.name), folder)
        if isinstance(values.get("name"), str) and ":" in values["name"]:
            values["name"] = registry.absolute(values["name"], folder)
        return values
    if isinstance(instance, dict):
        return {key: to_values(value, folder) for key, value in instance.items()}
    if isinstance(instance, (list, tuple)):
        return [to_values(item, folder) for item in instance]
    if isinstance(instance, (str, int, float, bool)) or instance is None:
        return instance
    return {"name": instance.name, **getattr(instance, "options", {})}


class _Dumper(yaml.SafeDumper):
    """Writes floats so that YAML readers agree they are floats: `1.0e-06`, never `1e-06`."""


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text.split("e")[0]:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _float)


def to_yaml(values: Any) -> str:
    """Returns plain values as YAML that reads back equal, floats and texts like "null" included."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
