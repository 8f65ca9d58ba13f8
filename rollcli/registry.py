"""Plug-ins by name: one mechanism for algorithms, rewards, environments, sources, engines and trackers.

A name is resolved in this order:

1. a colon form, `./mine.py:Shop` or `package.module:attribute`, imports exactly that;
2. a built-in: the kind's package lists its own in `BUILTIN`, name to "module:attribute", so that one look shows all of
   them and listing names imports nothing heavy;
3. an entry point of the group `rollcli.<kind>` in any installed distribution.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rollcli.errors import PluginError
from rollcli.suggest import did_you_mean

KINDS = ("algorithms", "rewards", "environments", "sources", "tools", "train_engines", "infer_engines", "trackers")
_PACKAGES = {
    "sources": "rollcli.data.sources",
    "tools": "rollcli.environments.tools",
    "train_engines": "rollcli.engines",
    "infer_engines": "rollcli.engines",
}


@cache
def builtin(kind: str) -> dict[str, str]:
    """Returns name → "module:attribute" of the plug-ins of `kind` that ship with rollcli."""
    package = importlib.import_module(_PACKAGES.get(kind, f"rollcli.{kind}"))
    attribute = kind.upper() if kind.endswith("_engines") else "BUILTIN"
    return getattr(package, attribute)


def names(kind: str) -> list[str]:
    """Returns every name of `kind` known here: built in, and offered by installed distributions."""
    return sorted({*builtin(kind), *(point.name for point in entry_points(group=f"rollcli.{kind}"))})


def resolve(kind: str, name: str, folder: Path | None = None) -> Any:
    """Returns the object that `name` stands for.

    Args:
        kind: one of `KINDS`.
        name: a registered name, `./file.py:attribute`, or `module:attribute`.
        folder: where a relative file is looked for first (a recipe's own folder); then the working directory.

    Raises:
        PluginError: unknown name (with the names known and places searched), missing file or attribute, failed import.
    """
    if ":" in name:
        return _from_target(kind, name, folder)
    if name in builtin(kind):
        return _from_target(kind, builtin(kind)[name], None)
    for point in entry_points(group=f"rollcli.{kind}"):
        if point.name == name:
            return _from_target(kind, point.value, None)
    known = names(kind)
    meant = did_you_mean(name, known)
    raise PluginError(
        f"unknown {_singular(kind)} `{name}`" + (f" (did you mean `{meant}`?)" if meant else ""),
        hint=f"known: {', '.join(known)}; searched built-ins and entry points `rollcli.{kind}`; "
        "a file is named as `./file.py:attribute`",
    )


def absolute(name: str, folder: Path | None) -> str:
    """Returns a colon form whose file is absolute, so that workers started elsewhere find the same file."""
    target, colon, attribute = name.rpartition(":")
    if not colon or not target.endswith(".py"):
        return name
    return f"{_find_file(Path(target), folder)}:{attribute}"


def _singular(kind: str) -> str:
    return kind.replace("_", " ").removesuffix("s")


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _find_file(path: Path, folder: Path | None) -> Path:
    tried = [base / path.expanduser() for base in (folder, Path.cwd()) if base is not None]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    raise PluginError(f"plug-in file `{path}` not found", hint="tried " + ", ".join(str(t) for t in tried))


def _from_target(kind: str, target: str, folder: Path | None) -> Any:
    module_name, _, attribute = target.rpartition(":")
    file = _find_file(Path(module_name), folder) if module_name.endswith(".py") else None
    try:
        module = _load_file(file) if file else importlib.import_module(module_name)
    except ImportError as error:
        missing = getattr(error, "name", None) or str(error)
        raise PluginError(
            f"{_singular(kind)} `{target}` does not import: {error}",
            hint=f"install what provides `{missing}`, then try again",
        ) from error
    # A plug-in is foreign code: whatever its import raises is the plug-in's fault, and is told as such.
    except Exception as error:
        raise PluginError(
            f"{_singular(kind)} `{target}` does not import: {type(error).__name__}: {error}",
            hint=f"correct `{module_name}`; `-v` shows where it fails",
        ) from error
    if not hasattr(module, attribute):
        public = [name for name in dir(module) if not name.startswith("_")]
        meant = did_you_mean(attribute, public)
        raise PluginError(
            f"`{module_name}` has no `{attribute}`" + (f" (did you mean `{meant}`?)" if meant else ""),
            hint=f"{_with_article(_singular(kind))} is named as `{module_name}:attribute`",
        )
    return getattr(module, attribute)


def _load_file(path: Path) -> Any:
    """Imports one file under a name of its own; the same file twice gives the same module."""
    name = f"rollcli_plugin_{abs(hash(str(path))):x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
