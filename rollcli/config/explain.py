"""What each key means: the schema's docstrings, read from its source."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_origin

from rollcli import registry
from rollcli.config.build import hints
from rollcli.config.schema import PIPELINES

ONE_OF = "one of "
OWN = "One of your own is named as `./file.py:Name` or `module:Name`."


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


def describe(cls: type, prefix: str = "", standing: Any = None) -> Iterator[FieldDoc]:
    """Yields every key below a dataclass, depth first; lists show as `key[]`, plug-ins with each name's options.

    `standing` is the block as it is where nothing is written, whose values are then the defaults.
    """
    for member in fields(cls):
        if not member.init:
            continue
        key = f"{prefix}{member.name}"
        doc = field_docs(cls).get(member.name, "")
        kind = member.metadata.get("plugin")
        names = member.metadata.get("names")
        if names:
            yield FieldDoc(key, _one_of(names), _default(member), f"{doc} {OWN}".strip())
            continue
        if kind:
            default = member.metadata["default"] or "required"
            yield FieldDoc(key, _one_of(kind), str(default), f"{doc} {OWN}".strip())
            for name in registry.names(kind):
                target = registry.resolve(kind, name)
                if is_dataclass(target):
                    yield from describe(target, f"{key}.{{{name}}}.")
            continue
        expected = hints(cls)[member.name]
        default = _default(member) if standing is None else _shown(getattr(standing, member.name))
        yield FieldDoc(key, _type_name(expected), default, doc)
        inner = get_args(expected)[0] if get_origin(expected) is list else expected
        if inner is not expected and is_dataclass(inner):
            yield from describe(inner, f"{key}[].")
        elif is_dataclass(inner):
            made = member.default_factory() if member.default_factory is not MISSING else None
            yield from describe(inner, f"{key}.", made if standing is None else getattr(standing, member.name))


def explain(query: str) -> list[FieldDoc]:
    """Returns the keys that `query` names: the key itself and all below it, or keys that end with it.

    A plug-in's name may stand in the query (`algorithm.grpo.clip_low`) or be left out, and a key that chooses one may
    be written with its `name` (`algorithm.name`).
    """
    every: dict[str, FieldDoc] = {}
    for cls in PIPELINES.values():
        for doc in describe(cls):
            every.setdefault(doc.key, doc)  # a key of several pipelines is told as the first has it
    wanted = ".".join(part.split("[")[0].strip("{}") for part in query.rstrip(".").split("."))
    if not wanted:
        return list(every.values())
    exact = [doc for key, doc in every.items() if any(f"{s}.".startswith(f"{wanted}.") for s in _spellings(key))]
    return exact or _choosing(wanted, every) or [doc for key, doc in every.items() if _ends_with(key, wanted)]


def _choosing(wanted: str, every: dict[str, FieldDoc]) -> list[FieldDoc]:
    """Returns the plug-in that `….name` chooses, or whose choice is a name without options of its own."""
    above, _, last = wanted.rpartition(".")
    chosen = [doc for key, doc in every.items() if doc.type.startswith(ONE_OF) and _plain(key) == above]
    if last == "name":
        return [replace(doc, key=f"{doc.key}.name", doc=f"Chooses the plug-in. {doc.doc}") for doc in chosen]
    return [doc for doc in chosen if last in doc.type.removeprefix(ONE_OF).split(", ")]


def _ends_with(key: str, wanted: str) -> bool:
    """Whether a key ends with `wanted`, or is an option of the plug-in that `wanted` ends with."""
    is_name = f"{{{wanted.rpartition('.')[2]}}}" in key.split(".")
    return any(s.endswith(f".{wanted}") or (is_name and f".{wanted}." in s) for s in _spellings(key))


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


def _spellings(key: str) -> set[str]:
    """Returns a key without and with the names of plug-ins in it."""
    return {_plain(key), _plain(re.sub(r"[{}]", "", key))}


def _one_of(kind: str) -> str:
    return ONE_OF + ", ".join(registry.names(kind))


def _type_name(expected: Any) -> str:
    if isinstance(expected, type) and get_origin(expected) is None:
        return {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}.get(
            expected.__name__, "block"
        )
    text = str(expected).replace("typing.", "").replace("rollcli.config.schema.", "")
    return text.replace("NoneType", "null").replace("None", "null")


def _default(member: Any) -> str:
    if member.default_factory is not MISSING:
        return _shown(member.default_factory())
    return "required" if member.default is MISSING else _shown(member.default)


def _shown(value: Any) -> str:
    if is_dataclass(value):
        return "…"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
