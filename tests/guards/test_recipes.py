"""Every recipe that ships loads, is short, and says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcli.cli.help import examples
from rollcli.config.load import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_some():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path):
    loaded = load_recipe(str(path))
    assert loaded.recipe.description and not loaded.recipe.description.endswith(".")
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_gives_reasons(path):
    assert "#" in path.read_text(), "a value that is not obvious has its reason beside it"


def test_examples_in_help_name_recipes_that_are_there():
    import typer

    from rollcli.cli.app import app

    def walk(command):
        yield command
        for each in getattr(command, "commands", {}).values():
            yield from walk(each)

    names = {path.stem for path in RECIPES}
    for command in walk(typer.main.get_command(app)):
        for line in examples(command) if not hasattr(command, "commands") else ():
            words = line.split()
            if words[1:2] == ["train"] or words[1:3] in (["recipes", "show"], ["recipes", "cp"], ["config", "show"]):
                recipe = words[2] if words[1] == "train" else words[3]
                assert recipe in names or recipe.endswith(".yaml"), line
