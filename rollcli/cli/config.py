"""`roll config`: what a recipe comes to, what is wrong with it, and what a key means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcli.cli import arguments, complete
from rollcli.cli.help import RollCommand, RollGroup
from rollcli.cli.output import Column, Output, help_lines
from rollcli.errors import NotFound

if TYPE_CHECKING:
    from rollcli.config.explain import FieldDoc
    from rollcli.config.load import LoadedRecipe

SHOW = """\
roll config show grpo-math
roll config show grpo-math algorithm.clip_high=0.28 --origin"""
VALIDATE = """\
roll config validate my.yaml
roll config validate my.yaml steps=10 --json"""
EXPLAIN = """\
roll config explain group_size
roll config explain rollout.
roll config explain algorithm.kl.coefficient"""

app = typer.Typer(
    cls=RollGroup, help="Show, check and explain a recipe's values.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("show", cls=RollCommand, epilog=SHOW)
def show(
    context: typer.Context,
    recipe: arguments.Recipe,
    overrides: arguments.Overrides = None,
    override: arguments.OverrideOptions = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from")] = False,
) -> None:
    """Show every value of a recipe, defaults included.

    Raises:
        RollError: the recipe is not there or does not validate.
    """
    from rollcli.config.dump import to_values, to_yaml
    from rollcli.config.load import load_recipe

    output: Output = context.obj
    loaded = load_recipe(recipe, arguments.overrides(overrides, override))
    values = to_values(loaded.recipe, loaded.folder)
    if not origin:
        text = to_yaml(values).rstrip("\n")
        output.document(values)
        output.value(text)
        output.data(text)
        return
    rows = [(key, value, origin_of(loaded, path)) for key, path, value in leaves(values)]
    for key, _, where in rows:
        output.value(f"{key}  {where}")
    output.document([{"key": key, "value": value, "origin": where} for key, value, where in rows])
    columns = [Column("key"), Column("value"), Column("from", drop=1)]
    output.table(columns, [[key, shown(value), where] for key, value, where in rows])


def leaves(values: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    """Yields `(dotted key, path, value)` of every value that holds no others."""
    from rollcli.config.build import dotted

    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    elif isinstance(values, list) and any(isinstance(item, (Mapping, list)) for item in values):
        for index, item in enumerate(values):
            yield from leaves(item, (*path, index))
    else:
        yield dotted(path), path, values


def origin_of(loaded: LoadedRecipe, path: tuple[str | int, ...]) -> str:
    """Returns where a value was written: `file:line`, `command line, override N`, or `default`."""
    place = loaded.places.get(path)
    if place is None and path[-1] == "name":
        # `algorithm: grpo` is short for a block with that name.
        written: Any = loaded.values
        for part in path[:-1]:
            written = written.get(part) if isinstance(written, Mapping) else written[part] if written else None
        place = loaded.places.get(path[:-1]) if isinstance(written, str) else None
    if place is None:
        return "default"
    return place.problem("").location if place.source == "command line" else f"{place.source}:{place.line}"


def shown(value: Any) -> str:
    """Returns a value as YAML writes it, on one line."""
    import json

    if value is None or isinstance(value, (bool, list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return str(value) if value != "" else '""'


@app.command("validate", cls=RollCommand, epilog=VALIDATE)
def validate(
    context: typer.Context,
    recipe: arguments.Recipe,
    overrides: arguments.Overrides = None,
    override: arguments.OverrideOptions = None,
) -> None:
    """Check a recipe and report every problem at once.

    Raises:
        ConfigError: with every problem.
    """
    from rollcli.config.load import load_recipe

    output: Output = context.obj
    loaded = load_recipe(recipe, arguments.overrides(overrides, override))
    output.document({"recipe": loaded.name, "path": loaded.path, "valid": True})
    output.value(loaded.path)
    output.data(f"{output.paint('ok', 'ok')}  {loaded.path}")


@app.command("explain", cls=RollCommand, epilog=EXPLAIN)
def explain(
    context: typer.Context,
    key: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]", help="A key, or the start of one; all of them if left out", autocompletion=complete.key
        ),
    ] = "",
) -> None:
    """Tell what a recipe's keys mean.

    Raises:
        NotFound: there is no such key.
    """
    from rollcli.config import explain as docs
    from rollcli.suggest import nearest

    output: Output = context.obj
    found = docs.explain(key)
    if len(found) == 1:
        found = docs.explain(found[0].key)
    if not found:
        names = docs.all_keys()
        close = nearest(key, dict.fromkeys([*names, *(name.rpartition(".")[2] for name in names)]), 3)
        meant = f"did you mean {', '.join(f'`{c}`' for c in close)}? " if close else ""
        raise NotFound(f"unknown key `{key}`", hint=f"{meant}run `roll config explain` to see all")
    for doc in found:
        output.value(doc.default if len(found) == 1 else f"{doc.key}={doc.default}")
    output.document([{"key": d.key, "type": type_words(d.type), "default": d.default, "doc": d.doc} for d in found])
    for doc in found:
        _show_doc(output, doc)


def _show_doc(output: Output, doc: FieldDoc) -> None:
    default = doc.default if doc.default in ("required", "…") else f"default {doc.default or 'empty'}"
    kind = type_words(doc.type)
    output.data(f"{output.paint(doc.key, 'literal')}  {output.paint(f'{kind}, {default}'.removesuffix(', …'), 'dim')}")
    text = doc.doc
    if kind.startswith("list"):
        text += " A list given anew replaces the one before it."
    for line in help_lines(text, 4):
        output.data(line)


def type_words(text: str) -> str:
    """Returns a type hint in words: `Literal['a', 'b'] | None` as `a | b | null`."""
    import re

    text = re.sub(r"Literal\[([^\]]*)\]", lambda m: " | ".join(re.findall(r"'([^']*)'", m[1])), text)
    for name, word in (("str", "text"), ("int", "whole number"), ("float", "number"), ("bool", "true or false")):
        text = re.sub(rf"\b{name}\b", word, text)
    return re.sub(r"\blist\[(.*)\]", r"list of \1", text)
