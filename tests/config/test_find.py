import pytest

from rollcli.config import find
from rollcli.config.find import find_recipe, recipe_files
from rollcli.errors import RecipeNotFound


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Three folders of recipes, in the order in which they are searched."""
    for folder, names in {"recipes": ["a", "b"], "extra": ["b", "c"], "shipped": ["c", "grpo-math"]}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.yaml").write_text(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_RECIPES", str(tmp_path / "extra"))
    monkeypatch.setattr(find, "shipped", lambda: tmp_path / "shipped")
    return tmp_path


def test_the_first_folder_that_has_a_name_wins(house):
    found = {name: path.read_text() for name, path in recipe_files().items()}
    assert found == {"a": "recipes", "b": "recipes", "c": "extra", "grpo-math": "shipped"}
    assert find_recipe("c") == house / "extra" / "c.yaml"


def test_a_path_is_taken_as_it_is(house):
    (house / "mine.yml").write_text("x")
    assert find_recipe("mine.yml").name == "mine.yml"
    assert find_recipe("./mine.yml").read_text() == "x"
    assert find_recipe(str(house / "mine.yml")).is_absolute()


def test_a_home_folder(house, monkeypatch):
    monkeypatch.setenv("HOME", str(house / "extra"))
    assert find_recipe("~/c.yaml") == house / "extra" / "c.yaml"


def test_an_unknown_name_says_the_nearest_and_the_folders(house):
    with pytest.raises(RecipeNotFound, match="no recipe called `grpo-maht`") as caught:
        find_recipe("grpo-maht")
    hint = caught.value.hint
    assert "`grpo-math`" in hint and str(house / "extra") in hint and "roll recipes ls" in hint


def test_nothing_near(house):
    with pytest.raises(RecipeNotFound) as caught:
        find_recipe("zzzzzzzz")
    assert "did you mean" not in caught.value.hint


def test_a_folder_is_no_recipe(house):
    with pytest.raises(RecipeNotFound, match="is not a file"):
        find_recipe("recipes/")
    with pytest.raises(RecipeNotFound, match=r"no recipe file `gone\.yaml`"):
        find_recipe("gone.yaml")


def test_recipes_ship_with_rollcli():
    assert find.shipped().is_dir() and list(find.shipped().glob("*.yaml"))
