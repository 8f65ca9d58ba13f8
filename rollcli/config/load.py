"""From a recipe's name and overrides to a checked recipe.

    schema default < `base:` recipe < recipe < overrides `key=value`

Mappings merge key by key; a list replaces the list before it. OmegaConf reads values and fills in `${…}`; every value
remembers where it came from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollcli.config.build import build_recipe, dotted
from rollcli.config.find import find_recipe
from rollcli.config.locate import Path as KeyPath
from rollcli.config.locate import Place, places
from rollcli.config.schema import Recipe
from rollcli.errors import ConfigError, Problem

_KEY = re.compile(r"([^.\[\]=]+)|\[(\d+)\]")


@dataclass
class LoadedRecipe:
    """A checked recipe, the plain values it was built from, and where each came from.

    `values` holds what the user and the base recipe said, interpolations filled in; with `folder` it rebuilds the same
    recipe in another process (`rebuild`).
    """

    name: str
    recipe: Recipe
    values: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)
    path: Path | None = None
    overrides: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path | None:
        """Folder of the recipe file: relative plug-in files are looked for there first."""
        return self.path.parent if self.path else None


def load_recipe(name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Returns the recipe called `name` (a name or a path), with `overrides` on top.

    Raises:
        RecipeNotFound: no such recipe.
        ConfigError: anything in it is wrong; all problems at once.
    """
    path = find_recipe(name)
    values, where = _read(path)
    if "base" in values:
        values, where = _with_base(values, where, path)
    problems: list[Problem] = []
    for number, override in enumerate(overrides, 1):
        problem = _apply(override, number, values, where)
        if problem:
            problems.append(problem)
    resolved = _interpolate(values, where, problems)
    try:
        recipe = build_recipe(resolved, where, path.parent)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems], error.hint) from None
    if problems:
        raise ConfigError(problems, hint="overrides are written `key=value`, for example `rollout.replicas=2`")
    return LoadedRecipe(path.stem, recipe, resolved, where, path, list(overrides))


def rebuild(values: Mapping[str, Any], folder: str | None = None) -> Recipe:
    """Returns the recipe that plain `values` stand for; how a worker gets the driver's recipe."""
    return build_recipe(values, {}, Path(folder) if folder else None)


def _read(path: Path) -> tuple[dict[str, Any], dict[KeyPath, Place]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(f"cannot be read: {error}", str(path))]) from error
    shown = _shown(path)
    where = places(text, shown)
    try:
        values = OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError([Problem(str(error).splitlines()[0], shown, 1, 1)]) from error
    return values, where


def _shown(path: Path) -> str:
    """Returns the path relative to the working directory when it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _with_base(
    values: dict[str, Any], where: dict[KeyPath, Place], path: Path
) -> tuple[dict[str, Any], dict[KeyPath, Place]]:
    named = values.pop("base")
    if not isinstance(named, str):
        raise ConfigError([where[("base",)].problem("`base`: expected the name or path of a recipe")])
    beside = path.parent / named
    base_values, base_where = _read(beside if beside.is_file() else find_recipe(named))
    if "base" in base_values:
        raise ConfigError([where[("base",)].problem(f"`{named}` has a `base:` of its own; one level is allowed")])
    _merge(base_values, values, (), base_where, where)
    return base_values, base_where


def _merge(
    target: dict[str, Any], layer: Mapping[str, Any], path: KeyPath,
    target_places: dict[KeyPath, Place], layer_places: Mapping[KeyPath, Place],
) -> None:  # fmt: skip
    """Lays `layer` over `target`, places included. A block whose `name` changes starts afresh."""
    for key, value in layer.items():
        at = (*path, key)
        below = target.get(key)
        both = isinstance(value, Mapping) and isinstance(below, dict)
        renamed = both and value.get("name", below.get("name")) != below.get("name")
        if both and not renamed:
            _merge(below, value, at, target_places, layer_places)
        else:
            target[key] = value
            for old in [p for p in target_places if p[: len(at)] == at]:
                del target_places[old]
            target_places.update({p: place for p, place in layer_places.items() if p[: len(at)] == at})
        if at in layer_places:
            target_places[at] = layer_places[at]


def _apply(override: str, number: int, values: dict[str, Any], where: dict[KeyPath, Place]) -> Problem | None:
    """Writes one `key=value` into `values`; returns what is wrong with it, if anything."""
    place = Place("command line", number, 1, override, len(override))
    key, equals, text = override.partition("=")
    if not equals or not key:
        return place.problem(f"`{override}` is not of the form key=value")
    if key[0] in "+~":
        return place.problem(f"`{override}`: keys take no prefix, write `{key.lstrip('+~')}={text}`")
    parts = _KEY.findall(key)
    path: KeyPath = tuple(int(index) if index else name for name, index in parts)
    if dotted(path) != key:
        return place.problem(f"`{key}` is not a key; write `a.b[0].c`")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (OmegaConfBaseException, ValueError) as error:
        return place.problem(f"`{text}` is not a value: {str(error).splitlines()[0]}")
    if value == "None":
        return place.problem(f"`{key}`: `None` is text; write `null` for no value")
    container: Any = values
    for part, following in zip(path, path[1:], strict=False):
        if isinstance(part, int):
            if not isinstance(container, list) or part >= len(container):
                return place.problem(f"`{key}`: there is no item [{part}]")
            container = container[part]
        else:
            if isinstance(container.get(part), str) and not isinstance(following, int):
                container[part] = {"name": container[part]}
            container = container.setdefault(part, {})
        if not isinstance(container, dict if not isinstance(following, int) else list):
            return place.problem(f"`{key}`: `{dotted(path[: path.index(part) + 1])}` has no keys of its own")
    last = path[-1]
    if isinstance(last, int) and last >= len(container):
        return place.problem(f"`{key}`: there is no item [{last}]")
    container[last] = value
    for old in [p for p in where if p[: len(path)] == path]:
        del where[old]
    for depth in range(1, len(path) + 1):
        where.setdefault(path[:depth], place)
    return None


def _interpolate(values: dict[str, Any], where: Mapping[KeyPath, Place], problems: list[Problem]) -> dict[str, Any]:
    config = OmegaConf.create(values)
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or ""
        path = tuple(int(index) if index else name for name, index in _KEY.findall(key))
        message = f"`{key}`: {str(error).splitlines()[0]}"
        place = where.get(path)
        problem = place.problem(message) if place else Problem(message)
        raise ConfigError([problem, *problems]) from error
