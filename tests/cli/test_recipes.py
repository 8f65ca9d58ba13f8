"""`roll recipes`."""

from __future__ import annotations

import json


def test_ls(roll, workplace):
    (workplace / "recipes" / "broken.yaml").write_text("steps: many\n")
    result = roll("recipes", "ls")
    lines = result.out.splitlines()
    assert lines[0].split() == ["recipe", "algorithm", "model", "description"]
    assert lines[1].startswith("broken  -          -              invalid: ")
    assert lines[2] == "sums    grpo       embedded:tiny  Sums of three digits"
    assert roll("recipes", "ls", "-q").out == "broken\nsums\n"


def test_ls_as_json(roll):
    found = json.loads(roll("recipes", "ls", "--json").out)
    assert found["recipes"][0] == {
        "name": "sums", "path": "recipes/sums.yaml", "algorithm": "grpo", "model": "embedded:tiny",
        "description": "Sums of three digits",
    }  # fmt: skip


def test_show_is_the_file(roll, workplace):
    result = roll("recipes", "show", "sums")
    assert result.out == (workplace / "recipes" / "sums.yaml").read_text() and result.err == "# recipes/sums.yaml\n"


def test_cp(roll, workplace):
    result = roll("recipes", "cp", "sums", "mine")
    assert result.out == "mine.yaml\n" and "roll train mine.yaml" in result.err
    assert (workplace / "mine.yaml").read_text() == (workplace / "recipes" / "sums.yaml").read_text()
    assert roll("recipes", "cp", "sums").out == "sums.yaml\n"
    (workplace / "sub").mkdir()
    assert roll("recipes", "cp", "sums", "sub").out == "sub/sums.yaml\n"


def test_cp_overwrites_only_by_force(roll, workplace):
    (workplace / "mine.yaml").write_text("precious")
    result = roll("recipes", "cp", "sums", "mine.yaml")
    assert result.code == 1 and (workplace / "mine.yaml").read_text() == "precious"
    assert result.err == (
        "error: file `mine.yaml` exists already\n\nhint: name another file, or write over it with `--force`\n"
    )
    assert roll("recipes", "cp", "sums", "mine.yaml", "--force").code == 0
    assert (workplace / "mine.yaml").read_text() != "precious"


def test_an_unknown_recipe(roll):
    assert roll("recipes", "show", "smus").err.startswith(
        "error: no recipe called `smus`\n\nhint: did you mean `sums`?"
    )


def test_cp_to_another_kind_of_file(roll, workplace):
    result = roll("recipes", "cp", "sums", "x.txt")
    assert result.code == 1 and not list(workplace.glob("x.txt*"))
    assert result.err == "error: a recipe's file ends in `.yaml`, `x.txt` does not\n\nhint: write `x.txt.yaml`\n"
