"""From a recipe's name and overrides to a checked recipe.

    schema default < `base:` recipe < recipe < overrides `key=value`

Mappings merge key by key; a list replaces the list before it. OmegaConf reads values and fills in `${…}`; every value
remembers where it came from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollcli.config.build import BAD, build_recipe, dotted, in_order, shown
from rollcli.config.find import find_recipe
from rollcli.config.locate import Path as KeyPath
from rollcli.config.locate import Place, places, yaml_problem
from rollcli.config.schema import Recipe, RlRecipe, TaskConfig
from rollcli.config.smoke import smoke_overrides
from rollcli.errors import ConfigError, Problem, RecipeNotFound

_KEY = re.compile(r"([^.\[\]=]+)|\[(\d+)\]")
_PLUGIN_FIELDS = {
    member.name for cls in (RlRecipe, TaskConfig) for member in fields(cls) if "plugin" in member.metadata
}
"""Keys whose value may be a bare name, short for a block with that `name`."""


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


def load_recipe(name: str, overrides: Sequence[str] = (), smoke: bool = False) -> LoadedRecipe:
    """Returns the recipe called `name` (a name or a path), with `overrides` on top.

    `smoke` makes it small first (config/smoke.py).

    Raises:
        RecipeNotFound: no such recipe.
        ConfigError: anything in it is wrong; all problems at once.
    """
    path = find_recipe(name)
    values, where = read_yaml(path)
    if "base" in values:
        values, where = _with_base(values, where, path)
    problems: list[Problem] = []
    if smoke:
        problems += _shrink(values, where)
    for number, override in enumerate(overrides, 1):
        problem = _apply(override, number, values, where)
        if problem:
            problems.append(problem)
    resolved = _interpolate(values, where, problems)
    try:
        recipe = build_recipe(resolved, where, path.parent)
    except ConfigError as error:
        raise ConfigError(in_order([*error.problems, *problems]), error.hint) from None
    if problems:
        raise ConfigError(
            in_order(problems), hint="overrides are written `key=value`, for example `rollout.replicas=2`"
        )
    return LoadedRecipe(path.stem, recipe, resolved, where, path, list(overrides))


def read_values(path: Path) -> dict[str, Any]:
    """Returns the plain values of a recipe file, interpolations filled in and nothing checked.

    Raises:
        ConfigError: it is no recipe file, or an interpolation has no target.
    """
    values, where = read_yaml(path)
    problems: list[Problem] = []
    filled = _interpolate(values, where, problems)
    if problems:
        raise ConfigError(problems)
    return filled


def rebuild(values: Mapping[str, Any], folder: str | None = None) -> Recipe:
    """Returns the recipe that plain `values` stand for; how a worker gets the driver's recipe."""
    return build_recipe(values, {}, Path(folder) if folder else None)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, Place]]:
    """Returns the plain values of a YAML file, interpolations as they are written, and the place of every key.

    Raises:
        ConfigError: it cannot be read or is no mapping; every problem at its place.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(f"cannot be read: {error}", str(path))]) from error
    source = _shown(path)
    where = places(text, source)
    try:
        values = OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)
    except yaml.YAMLError as error:
        raise ConfigError([yaml_problem(error, text, source)]) from error
    except (OmegaConfBaseException, ValueError) as error:
        key = getattr(error, "full_key", None) or ""
        place = where.get(_path(key), where[()])
        raise ConfigError([place.problem(f"`{key}`: {_first_line(error)}" if key else _first_line(error))]) from error
    return values, where


def _path(key: str) -> KeyPath:
    return tuple(int(index) if index else name for name, index in _KEY.findall(key))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _shown(path: Path) -> str:
    """Returns the path relative to the working directory when it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _with_base(
    values: dict[str, Any], where: dict[KeyPath, Place], path: Path
) -> tuple[dict[str, Any], dict[KeyPath, Place]]:
    named, place = values.pop("base"), where[("base",)]
    if not isinstance(named, str):
        raise ConfigError([place.problem("`base`: expected the name or path of a recipe")])
    beside = path.parent / named
    try:
        base_values, base_where = read_yaml(beside if beside.is_file() else find_recipe(named))
    except RecipeNotFound as error:
        raise ConfigError([place.problem(f"`base`: {error}")], error.hint) from error
    if "base" in base_values:
        raise ConfigError([place.problem(f"`{named}` has a `base:` of its own; one level is allowed")])
    _merge(base_values, values, (), base_where, where)
    base_where[()] = where[()]
    return base_values, base_where


def _merge(
    target: dict[str, Any], layer: Mapping[str, Any], path: KeyPath,
    target_places: dict[KeyPath, Place], layer_places: Mapping[KeyPath, Place],
) -> None:  # fmt: skip
    """Lays `layer` over `target`, places included. A block whose `name` changes starts afresh."""
    for key, value in layer.items():
        at = (*path, key)
        below = target.get(key)
        if isinstance(value, Mapping) and isinstance(below, str) and key in _PLUGIN_FIELDS:
            below = _as_block(target, at, target_places)
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


def _as_block(container: dict[str, Any], path: KeyPath, where: dict[KeyPath, Place]) -> dict[str, Any]:
    """Writes a plug-in's bare name as the block it is short for."""
    block = container[path[-1]] = {"name": container[path[-1]]}
    if path in where:
        where[(*path, "name")] = where[path]
    return block


def _apply(override: str, number: int, values: dict[str, Any], where: dict[KeyPath, Place]) -> Problem | None:
    """Writes one `key=value` into `values`; returns what is wrong with it, if anything."""
    place = Place("command line", number, 1, override, len(override))
    key, equals, text = override.partition("=")
    if not equals or not key:
        return place.problem(f"`{override}` is not of the form key=value")
    if key[0] in "+~":
        return place.problem(f"`{override}`: keys take no prefix, write `{key.lstrip('+~')}={text}`")
    path = _path(key)
    if dotted(path) != key or isinstance(path[0], int):
        return place.problem(f"`{key}` is not a key; write `a.b[0].c`")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        return place.problem(f"`{text}` is not a value: {getattr(error, 'problem', None) or _first_line(error)}")
    if text.strip() == "None":
        return place.problem(f"`{key}`: `None` is text; write `null` for no value")
    obstacle = _set(values, path, value, where, place)
    return place.problem(f"`{key}`: {obstacle}") if obstacle else None


def _set(values: dict[str, Any], path: KeyPath, value: Any, where: dict[KeyPath, Place], place: Place) -> str | None:
    """Puts `value` at `path`, said at `place`; returns what stands in the way, if anything."""
    if len(path) > 1 and path[-1] == "name" and path[-2] in _PLUGIN_FIELDS:
        _start_afresh(values, path[:-1], value, where)
    obstacle = _write(values, path, value, where)
    if obstacle:
        return obstacle
    for old in [p for p in where if p[: len(path)] == path]:
        del where[old]
    for depth in range(1, len(path) + 1):
        where.setdefault(path[:depth], place)
    return None


def _shrink(values: dict[str, Any], where: dict[KeyPath, Place]) -> list[Problem]:
    """Makes a recipe small; returns what is wrong with its `smoke:` block."""
    problems: list[Problem] = []
    for key, value in list(smoke_overrides(values)):
        place = where.get(("smoke", key)) or where.get(("smoke",)) or where[()]
        path = _path(key)
        obstacle = _set(values, path, value, where, place) if path and dotted(path) == key else "is not a key"
        if obstacle:
            problems.append(place.problem(f"`smoke`: `{key}`: {obstacle}"))
    return problems


def _start_afresh(values: dict[str, Any], path: KeyPath, name: Any, where: dict[KeyPath, Place]) -> None:
    """Drops a block's options when another plug-in is chosen, as laying recipes over each other does.

    They are the other's options. Those of the command line stay: they are meant for this one.
    """
    block: Any = values
    for part in path:
        block = block[part] if isinstance(block, (dict, list)) and _has(block, part) else None
    if not isinstance(block, dict) or block.get("name") == name:
        return
    for key in [key for key in block if key != "name"]:
        at = (*path, key)
        if at in where and where[at].source != "command line":
            del block[key]
            for old in [place for place in where if place[: len(at)] == at]:
                del where[old]


def _has(container: dict | list, part: str | int) -> bool:
    return part < len(container) if isinstance(container, list) and isinstance(part, int) else part in container


def _write(values: dict[str, Any], path: KeyPath, value: Any, where: dict[KeyPath, Place]) -> str | None:
    """Puts `value` at `path`, making blocks that are not there; returns what stands in the way, if anything."""
    container: Any = values
    for depth, part in enumerate(path):
        here, rest = dotted(path[:depth]), path[depth + 1 :]
        if isinstance(part, int):
            if not isinstance(container, list):
                return f"`{here}` is {shown(container)}, not a list"
            if part >= len(container):
                return f"`{here}` has no item [{part}]"
        elif isinstance(container, list):
            return f"`{here}` is a list; write `{here}[0]` for its first item"
        elif not isinstance(container, dict):
            return f"`{here}` is {shown(container)}, which has no keys; replace it whole: `{here}=…`"
        if not rest:
            container[part] = value
            return None
        below = container[part] if isinstance(part, int) else container.get(part)
        if below is None:
            if any(isinstance(later, int) for later in rest):
                return f"`{dotted(path[: depth + 1])}` is not written in the recipe; give the whole list"
            for later in reversed(rest):
                value = {later: value}
            container[part] = value
            return None
        if isinstance(below, str) and part in _PLUGIN_FIELDS:
            below = _as_block(container, path[: depth + 1], where)
        container = below
    return None


def _interpolate(values: dict[str, Any], where: Mapping[KeyPath, Place], problems: list[Problem]) -> dict[str, Any]:
    """Returns `values` with every `${…}` filled in; adds a problem for each that cannot be."""
    config = OmegaConf.create(values)

    def fill(value: Any, node: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: fill(item, node, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item, node, (*path, index)) for index, item in enumerate(value)]
        if not (isinstance(value, str) and "${" in value):
            return value
        try:
            for part in path:
                node = node[part]
            return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except (OmegaConfBaseException, RecursionError) as error:
            message = f"`{dotted(path)}`: {_first_line(error)}"
            problems.append(where[path].problem(message) if path in where else Problem(message))
            return BAD

    return fill(values, config, ())
