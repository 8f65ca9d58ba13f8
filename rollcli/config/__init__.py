"""What a recipe says: schema, loading, locating, overriding, explaining. Imports neither torch nor Ray."""

from rollcli.config.load import LoadedRecipe, load_recipe, rebuild
from rollcli.config.schema import Recipe, RlRecipe, SftRecipe

__all__ = ["LoadedRecipe", "Recipe", "RlRecipe", "SftRecipe", "load_recipe", "rebuild"]
