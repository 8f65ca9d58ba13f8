import pytest

from rollcli import registry
from rollcli.errors import PluginError


class Point:
    """Stands for an entry point of an installed distribution."""

    def __init__(self, name, value):
        self.name, self.value = name, value


@pytest.fixture
def distribution(monkeypatch):
    """A distribution that offers a reward called `theirs`."""
    points = {"rollcli.rewards": [Point("theirs", "json:dumps")]}
    monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))


@pytest.mark.parametrize("kind", registry.KINDS)
def test_names_are_listed_without_importing_what_they_stand_for(kind):
    assert registry.names(kind) == sorted(registry.builtin(kind))
    assert all(target.startswith("rollcli.") and target.count(":") == 1 for target in registry.builtin(kind).values())


def test_a_builtin_name():
    from rollcli.algorithms.grpo import Grpo

    assert registry.resolve("algorithms", "grpo") is Grpo


def test_an_entry_point(distribution):
    import json

    assert registry.resolve("rewards", "theirs") is json.dumps
    assert set(registry.names("rewards")) == {*registry.builtin("rewards"), "theirs"}


def test_unknown_name_says_what_was_meant_known_and_searched(distribution):
    with pytest.raises(PluginError, match=r"unknown reward `mth` \(did you mean `math`\?\)") as caught:
        registry.resolve("rewards", "mth")
    assert "success, theirs" in caught.value.hint and "rollcli.rewards" in caught.value.hint
    with pytest.raises(PluginError, match=r"unknown train engine `zzz`$"):
        registry.resolve("train_engines", "zzz")


def test_module_and_attribute():
    import math

    assert registry.resolve("rewards", "math:sqrt") is math.sqrt


def test_a_file_is_looked_for_beside_the_recipe_then_in_the_working_directory(tmp_path, monkeypatch):
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
        (folder / "mine.py").write_text(f"where = {folder.name!r}\n")
    monkeypatch.chdir(here)
    assert registry.resolve("rewards", "./mine.py:where", beside) == "beside"
    assert registry.resolve("rewards", "mine.py:where") == "here"
    assert registry.absolute("./mine.py:where", beside) == f"{beside}/mine.py:where"
    assert registry.absolute("math", beside) == "math"
    assert registry.absolute("math:sqrt", beside) == "math:sqrt"


def test_the_same_file_is_imported_once(tmp_path):
    (tmp_path / "mine.py").write_text("class A: ...\n")
    assert registry.resolve("rewards", "mine.py:A", tmp_path) is registry.resolve("rewards", "mine.py:A", tmp_path)


def test_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("a = 7\n")
    assert registry.resolve("rewards", "~/mine.py:a") == 7


def test_a_missing_file_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(PluginError, match=r"plug-in file `gone\.py` not found") as caught:
        registry.resolve("rewards", "./gone.py:score", tmp_path)
    assert str(tmp_path / "gone.py") in caught.value.hint


def test_a_missing_attribute_is_suggested(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response): ...\n")
    with pytest.raises(PluginError, match=r"has no `scor` \(did you mean `score`\?\)"):
        registry.resolve("rewards", "mine.py:scor", tmp_path)


def test_a_missing_module_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("import surely_not_installed\n")
    with pytest.raises(PluginError, match="does not import: No module named 'surely_not_installed'") as caught:
        registry.resolve("rewards", "mine.py:a", tmp_path)
    assert "`surely_not_installed`" in caught.value.hint
    with pytest.raises(PluginError, match="does not import"):
        registry.resolve("rewards", "not_there.module:a")


@pytest.mark.parametrize(
    ("text", "reason"), [("def (:\n", "SyntaxError"), ("1 / 0\n", "ZeroDivisionError"), ("x = y\n", "NameError")]
)
def test_a_plug_in_that_fails_while_it_is_imported_is_one_error_and_may_be_mended(tmp_path, text, reason):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(PluginError, match=f"does not import: {reason}"):
        registry.resolve("rewards", "mine.py:a", tmp_path)
    file.write_text("a = 'mended: a longer text than before'\n")
    assert registry.resolve("rewards", "mine.py:a", tmp_path).startswith("mended")


def test_nothing_before_the_colon():
    with pytest.raises(PluginError, match="does not import"):
        registry.resolve("rewards", ":score")
