"""`roll recipes`: what is there, print one, copy one to own it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollcli.cli import arguments
from rollcli.cli.help import RollCommand, RollGroup
from rollcli.cli.output import Column, Output
from rollcli.errors import ConfigError, RollError

LS = """\
roll recipes ls
roll recipes ls --json"""
SHOW = """\
roll recipes show grpo-math
roll recipes show grpo-math > my.yaml"""
CP = """\
roll recipes cp grpo-gsm8k my.yaml
roll recipes cp grpo-gsm8k  # keeps the name, in this folder"""

app = typer.Typer(cls=RollGroup, help="List, print and copy recipes.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls", cls=RollCommand, epilog=LS)
def ls(context: typer.Context) -> None:
    """List recipes, with where each one is."""
    from rollcli.config.find import folders, recipe_files

    output: Output = context.obj
    found = [summary(name, path) for name, path in recipe_files().items()]
    output.document({"recipes": found, "folders": folders()})
    if output.quiet == 1:
        for each in found:
            output.value(each["name"])
    columns = [Column("recipe"), Column("algorithm", drop=2), Column("model", drop=3), Column("description")]
    output.table(columns, [[each[column.name if i else "name"] for i, column in enumerate(columns)] for each in found])
    if not found:
        output.note(f"no recipes in {', '.join(str(folder) for folder in folders())}")
    elif not output.as_json:
        output.hint("print one with `roll recipes show NAME`, copy one with `roll recipes cp NAME my.yaml`")


def summary(name: str, path: Path) -> dict[str, str]:
    """Returns a recipe in one line; one that does not validate says so instead of hiding the others."""
    from rollcli.config.load import load_recipe

    try:
        recipe = load_recipe(str(path)).recipe
    except ConfigError as error:
        described = f"invalid: {error.problems[0]}"
        return {"name": name, "path": str(path), "algorithm": "-", "model": "-", "description": described}
    algorithm = getattr(getattr(recipe, "algorithm", None), "name", recipe.pipeline)
    return {
        "name": name, "path": str(path), "algorithm": algorithm, "model": recipe.model.path,
        "description": recipe.description,
    }  # fmt: skip


@app.command("show", cls=RollCommand, epilog=SHOW)
def show(context: typer.Context, recipe: arguments.Recipe) -> None:
    """Print a recipe as it is written, comments included.

    Raises:
        RecipeNotFound: there is none of that name.
    """
    from rollcli.config.find import find_recipe

    output: Output = context.obj
    path = find_recipe(recipe)
    text = path.read_text(encoding="utf-8")
    output.document({"name": path.stem, "path": path, "text": text})
    output.value(path)
    output.note(f"# {path}")
    output.data(text.rstrip("\n"))


@app.command("cp", cls=RollCommand, epilog=CP)
def cp(
    context: typer.Context,
    recipe: arguments.Recipe,
    target: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Where to; RECIPE.yaml here if left out")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file")] = False,
) -> None:
    """Copy a recipe, to own and change it.

    Raises:
        RollError: the file exists already, or is no YAML file by its name.
    """
    from rollcli.config.find import find_recipe

    output: Output = context.obj
    source = find_recipe(recipe)
    path = Path(target or source.name)
    if path.is_dir():
        path = path / source.name
    elif not path.suffix:
        path = path.with_name(path.name + ".yaml")
    elif path.suffix not in (".yaml", ".yml"):
        raise RollError(f"a recipe's file ends in `.yaml`, `{path}` does not", hint=f"write `{path}.yaml`")
    if path.exists() and not force:
        raise RollError(f"file `{path}` exists already", hint="name another file, or write over it with `--force`")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.read_bytes())
    output.document({"source": source, "path": path})
    output.value(path)
    output.data(str(path))
    output.hint(f"run it with `roll train {path}`")
