"""Where recipes are: the working directory's `recipes/`, `$ROLL_RECIPES`, and those that ship with rollcli."""

from __future__ import annotations

import os
from pathlib import Path

from rollcli.errors import RecipeNotFound
from rollcli.suggest import nearest

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped() -> Path:
    """Folder of the recipes that travel with rollcli: inside an installed package, beside it in a checkout."""
    installed = _PACKAGE / "share" / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def folders() -> list[Path]:
    """Returns the folders searched for a recipe's name, first match wins."""
    extra = os.environ.get("ROLL_RECIPES")
    return [Path("recipes"), *([Path(extra)] if extra else []), shipped()]


def recipe_files() -> dict[str, Path]:
    """Returns every recipe by name."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")) if folder.is_dir() else []:
            found.setdefault(path.stem, path)
    return found


def find_recipe(name: str) -> Path:
    """Returns the file of a recipe given by name or by path.

    Raises:
        RecipeNotFound: with the nearest names and the folders searched.
    """
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") or "/" in name:
        if path.is_file():
            return path
        kind = "folder" if path.is_dir() else "file"
        hint = "run `roll recipes ls` to see what is there"
        raise RecipeNotFound(f"recipe `{name}` is not a file" if kind == "folder" else f"no recipe file `{name}`", hint)
    found = recipe_files()
    if name in found:
        return found[name]
    close = nearest(name, found, count=3, cutoff=0.4)
    searched = ", ".join(str(folder) for folder in folders())
    meant = f"did you mean {', '.join(f'`{c}`' for c in close)}? " if close else ""
    raise RecipeNotFound(
        f"no recipe called `{name}`",
        hint=f"{meant}searched {searched}; run `roll recipes ls` to see all",
    )
