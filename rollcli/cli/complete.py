"""Shell completion: reads files only, imports nothing heavy, swallows every error, offers at most 50 items."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, get_args, get_origin

MOST = 50
Item = tuple[str, str]
_BREAKS = ("=", "@", ":")
"""Characters at which bash starts a new word."""
_before = ""
"""What stands before the last of them in the word that bash completes; it is neither sent nor replaced."""


def completer(offer: Callable[[str], Iterable[Item]]) -> Callable[[str], list[Item]]:
    """Makes a completer of a function that offers `(value, help)` for what was typed so far."""

    @wraps(offer)
    def complete(incomplete: str) -> list[Item]:
        typed = _before + incomplete
        try:
            found = [(value, meaning) for value, meaning in offer(typed) if value.startswith(typed)]
            return [(value.removeprefix(_before), meaning) for value, meaning in found[:MOST]]
        except Exception:  # a broken recipe or run must not print a traceback into the user's prompt
            return []

    return complete


@completer
def recipe(incomplete: str) -> Iterable[Item]:
    """Names of recipes with their descriptions, then YAML files and folders."""
    from rollcli.config.find import recipe_files

    if "/" not in incomplete:
        yield from ((name, describe(path)) for name, path in recipe_files().items())
    folder, _, start = incomplete.rpartition("/")
    base = Path(folder or ("/" if incomplete.startswith("/") else "."))
    prefix = incomplete[: len(incomplete) - len(start)]
    for path in sorted(base.iterdir()) if base.is_dir() else []:
        if path.is_dir() and not path.name.startswith("."):
            yield f"{prefix}{path.name}/", "folder"
        elif path.suffix in (".yaml", ".yml"):
            yield f"{prefix}{path.name}", describe(path)


def describe(path: Path) -> str:
    """Returns the description of a recipe file, read without a YAML parser; one that cannot be read has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    found = re.search(r"^description:\s*(.+?)\s*$", text, re.MULTILINE)
    return found[1].strip("'\"") if found else ""


@completer
def run(incomplete: str) -> Iterable[Item]:
    """Ids of runs, newest first, with recipe and status."""
    from rollcli.runs.listing import list_runs

    for entry in list_runs():
        yield entry.directory.id, f"{entry.status.recipe} {entry.status.state} step {entry.status.step}".strip()


@completer
def checkpoint(incomplete: str) -> Iterable[Item]:
    """Checkpoints as `run@step`, newest run and newest step first."""
    from rollcli.runs.directory import list_checkpoints
    from rollcli.runs.listing import list_runs

    for entry in list_runs():
        steps = list_checkpoints(entry.directory.checkpoints)
        for step in reversed(steps):
            yield f"{entry.directory.id}@{step}", f"{entry.status.recipe} {entry.status.state}".strip()


@completer
def override(incomplete: str) -> Iterable[Item]:
    """Keys of a recipe, one level at a time (`rollout.`, `steps=`); after the `=`, the values a key may have."""
    name, equals, _ = incomplete.partition("=")
    if equals:
        yield from ((f"{name}={choice}", "") for choice in choices(name))
        return
    offered: dict[str, str] = {}
    for written, doc in keys().items():
        if written.startswith(incomplete):
            head, dot, _ = written[len(incomplete) :].partition(".")
            offered.setdefault(f"{incomplete}{head}{dot or '='}", "" if dot else doc)
    yield from sorted(offered.items())


def keys() -> dict[str, str]:
    """Returns every key that takes a value, as an override writes it, with its meaning; `[0]` stands for any item."""
    from rollcli.config.explain import explain

    found = {}
    for doc in explain(""):
        written = re.sub(r"\.\{[^}]*\}", "", doc.key).replace("[]", "[0]")
        if doc.type != "block" and not doc.type.endswith("Config]"):
            found[written] = doc.doc
    return found


@completer
def key(incomplete: str) -> Iterable[Item]:
    """Keys of a recipe, for `roll config explain`."""
    from rollcli.config.explain import all_keys

    heads = {name[: len(incomplete)] + name[len(incomplete) :].partition(".")[0] for name in all_keys()}
    yield from ((name, "") for name in sorted(heads))


@completer
def reward(incomplete: str) -> Iterable[Item]:
    """Names of rewards."""
    from rollcli import registry

    yield from ((name, "reward") for name in registry.names("rewards"))


def choices(key: str) -> list[str]:
    """Returns the values that the key may have when they can be counted: names, words of a list, true and false."""
    from rollcli import registry
    from rollcli.config.build import hints
    from rollcli.config.schema import PIPELINES

    found: list[str] = []
    for cls in PIPELINES.values():
        for owner, member in _members(cls, [part.split("[")[0] for part in key.split(".")]):
            kind = member.metadata.get("plugin") or member.metadata.get("names")
            if kind:
                found += registry.names(kind)
            else:
                found += _literals(hints(owner)[member.name])
    return list(dict.fromkeys(found))


def _members(cls: type, parts: list[str]) -> Iterable[tuple[type, Any]]:
    """Yields every (dataclass, field) that dotted parts may mean below a dataclass, plug-ins' own fields included."""
    from dataclasses import fields, is_dataclass

    from rollcli import registry
    from rollcli.config.build import hints

    for member in fields(cls):
        if member.name != parts[0]:
            continue
        kind = member.metadata.get("plugin")
        if len(parts) == 1 or (kind and parts[1:] == ["name"]):
            yield cls, member
        elif kind:
            targets = [registry.resolve(kind, name) for name in registry.names(kind)]
            yield from (found for t in targets if is_dataclass(t) for found in _members(t, parts[1:]))
        else:
            expected = hints(cls)[member.name]
            inner = get_args(expected)[0] if get_origin(expected) is list else expected
            if is_dataclass(inner):
                yield from _members(inner, parts[1:])


def _literals(expected: Any) -> list[str]:
    from typing import Literal

    if expected is bool:
        return ["true", "false"]
    if get_origin(expected) is Literal:
        return [str(choice) for choice in get_args(expected)]
    return [choice for part in get_args(expected) if part is not type(None) for choice in _literals(part)]


def join_words() -> None:
    """Undoes bash's splitting of `key=value` and `run@step` into three words, before Typer reads them.

    Bash replaces only what comes after the last split, so completers take what stands before it from `_before`.
    """
    global _before
    if os.environ["_ROLL_COMPLETE"] != "complete_bash":
        return
    words, at = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
    joined: list[str] = []
    for number, word in enumerate(words[: at + 1]):
        splits = word in _BREAKS or words[number - 1] in _BREAKS
        if number > 1 and word and splits:
            joined[-1] += word
        else:
            joined.append(word)
    *earlier, current = joined
    option, equals, value = current.partition("=")
    if current.startswith("-") and equals:
        _before, joined = "", [*earlier, option, value]
    else:
        # Readline counts an `@` to the word after it, unlike the other marks.
        cuts = [current.rfind("=") + 1, current.rfind(":") + 1, current.rfind("@")]
        _before = current[: max(cuts)]
        joined = [*earlier, current[len(_before) :]]
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(joined), str(len(joined) - 1)
