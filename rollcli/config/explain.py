"""What each key means: the schema's docstrings, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from rollcli import registry
from rollcli.config.build import hints
from rollcli.config.schema import PIPELINES


@dataclass(frozen=True)
class FieldDoc:
    """One key of a recipe: its dotted path, type, default and meaning."""

    key: str
    type: str
    default: str
    doc: str


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstring that stands under each field of a dataclass, inherited ones included."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body
        for statement, following in zip(body, body[1:]):
            is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and is_doc:
                docs[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return docs


def describe(cls: type, prefix: str = "") -> Iterator[FieldDoc]:
    """Yields every key below a dataclass, depth first; lists show as `key[]`, plug-ins with each name's options."""
    for member in fields(cls):
        if not member.init:
            continue
        key = f"{prefix}{member.name}"
        doc = field_docs(cls).get(member.name, "")
        kind = member.metadata.get("plugin")
        if kind:
            default = member.metadata["default"] or "required"
            yield FieldDoc(key, f"one of {', '.join(registry.names(kind))}", str(default), doc)
            for name in registry.names(kind):
                target = registry.resolve(kind, name)
                if is_dataclass(target):
                    yield from describe(target, f"{key}.{{{name}}}.")
            continue
        expected = hints(cls)[member.name]
        yield FieldDoc(key, _type_name(expected), _default(member), doc)
        inner = get_args(expected)[0] if get_origin(expected) is list else expected
        if is_dataclass(inner):
            yield from describe(inner, f"{key}[]." if inner is not expected else f"{key}.")


def explain(query: str) -> list[FieldDoc]:
    """Returns the keys that `query` names: the key itself and all below it, or keys that end with it."""
    every: dict[str, FieldDoc] = {}
    for cls in PIPELINES.values():
        for doc in describe(cls):
            every.setdefault(doc.key, doc)  # a key of several pipelines is told as the first has it
    plain = {_plain(key): doc for key, doc in every.items()}
    wanted = _plain(query.rstrip("."))
    exact = [doc for key, doc in plain.items() if key == wanted or key.startswith(wanted + ".")]
    if not wanted:
        return list(every.values())
    return exact or [doc for key, doc in plain.items() if key.endswith("." + wanted)]


def all_keys() -> list[str]:
    """Returns every key as an override writes it, for completion and suggestions."""
    return sorted({_plain(doc.key) for cls in PIPELINES.values() for doc in describe(cls)})


def _plain(key: str) -> str:
    """Drops list marks and plug-in names: `tasks[].source.{dataset}.path` and `tasks[0].source.path` agree."""
    parts = []
    for part in key.split("."):
        if not part.startswith("{"):
            parts.append(part.split("[")[0])
    return ".".join(parts)


def _type_name(expected: Any) -> str:
    if isinstance(expected, type) and get_origin(expected) is None:
        return {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}.get(
            expected.__name__, "block"
        )
    text = str(expected).replace("typing.", "").replace("rollcli.config.schema.", "")
    return text.replace("NoneType", "null").replace("None", "null")


def _default(member: Any) -> str:
    if member.default_factory is not MISSING:
        value = member.default_factory()
        return "…" if is_dataclass(value) else str(value)
    if member.default is MISSING:
        return "required"
    if member.default is None or isinstance(member.default, bool):
        return {None: "null", True: "true", False: "false"}[member.default]
    return str(member.default)
