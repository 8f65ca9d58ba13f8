"""What is written down reads back equal: the acceptance of None, "null", "1e5", "a: b" and their like."""

import random

import pytest
import yaml

from rollcli.config.dump import to_values, to_yaml
from rollcli.config.load import load_recipe, read_values, rebuild

TRICKY = [
    None, "null", "None", "~", "", " ", "1e5", "1e-5", "1.5e3", "1E5", "-1e5", "1_000", "0x10", "0o7", "12:30", "1.",
    ".5", "5", "true", "yes", "on", "off", "2024-01-01", ".inf", ".nan", "<<", "=", "a: b", "a:", "- a", "# c", "a #b",
    "'", '"', "\\", "{a}", "[1]", "!x", "&a", "*a", "%a", "@a", "`a`", "|", ">", "?", "a\nb", "a\n", "\n", "  x ", "\t",
    "a\tb", "a\r\nb", "é", "日本", "\U0001f600", "\x85", "\u2028", "\ufeff", "\x07", "x" * 300, "a b " * 100,
    "${x}", "\\${x}", "\\\\${x}", "${", "a${b}${c}\\", "$x", "$$", r"$\boxed{}$", r"\frac{1}{${2}}",
    1e-6, 1e5, 1e16, 1e22, 0.1, 1 / 3, -0.0, 1.0, 1e308, 5e-324, float("inf"), float("-inf"), 0, -3, 10**20,
    True, False, [], {}, [None, "null", [1e-6]], {"null": None, "1e5": 1, "a: b": "a: b", "true": True, "${x}": "${x}"},
]  # fmt: skip


def read_back(values, folder):
    file = folder / "values.yaml"
    file.write_text(to_yaml(values), encoding="utf-8", newline="")
    return read_values(file)


@pytest.mark.parametrize("value", TRICKY, ids=ascii)
def test_a_tricky_value_reads_back_equal_and_of_its_type(value, tmp_path):
    values = {"a": value, "b": [value, {"c": value}]}
    assert repr(read_back(values, tmp_path)) == repr(values)


def test_any_mixture_reads_back_equal(tmp_path):
    draw = random.Random(7)

    def value(depth):
        if depth and draw.random() < 0.4:
            return [value(depth - 1) for _ in range(draw.randrange(4))]
        if depth and draw.random() < 0.4:
            return {text(): value(depth - 1) for _ in range(draw.randrange(4))}
        kind = draw.randrange(4)
        if kind == 0:
            return draw.choice(TRICKY[:-4])
        if kind == 1:
            return draw.uniform(-1, 1) * 10 ** draw.randrange(-30, 30)
        return text() if kind == 2 else draw.randrange(-(10**9), 10**9)

    def text():
        return "".join(draw.choice("aé1e5.-: #'\"\\${}[]\n\t,&*!|>%@`~_ ") for _ in range(1 + draw.randrange(8)))

    for _ in range(150):
        values = {f"k{i}": value(3) for i in range(4)}
        assert repr(read_back(values, tmp_path)) == repr(values)


def test_plain_yaml_readers_agree_on_numbers():
    values = {"a": 1e-6, "b": 1e22, "c": "1e5", "d": 1.0, "e": float("inf")}
    assert yaml.safe_load(to_yaml(values)) == values


def test_the_same_value_twice_is_written_twice():
    shared = [1, 2]
    assert to_yaml({"a": shared, "b": shared}) == "a:\n- 1\n- 2\nb:\n- 1\n- 2\n"


def test_a_recipe_written_down_is_the_same_recipe(recipe, tmp_path):
    more = "description: '1e5'\nseed: 5\npolicy: {engine_args: {a.b: '${seed}', c: null}}\nplacement: {policy: '0'}\n"
    overrides = ["tasks[0].system=\"say: 'yes'\"", r"tasks[0].source.prompt='\${{expression}}'"]
    loaded = load_recipe(recipe(more=more), overrides)
    assert loaded.recipe.tasks[0].source.prompt == "${{expression}}"
    values = to_values(loaded.recipe, loaded.folder)
    assert rebuild(values) == loaded.recipe
    (tmp_path / "config.yaml").write_text(to_yaml(values), encoding="utf-8")
    again = load_recipe("config.yaml")
    assert again.recipe == loaded.recipe
    assert read_values(tmp_path / "config.yaml") == values == to_values(again.recipe, again.folder)


@pytest.mark.parametrize("pipeline", ["rl", "sft"])
def test_every_value_is_there_defaults_included(recipe, pipeline):
    values = to_values(load_recipe(recipe(), [f"pipeline={pipeline}"]).recipe)
    assert values["policy"]["optimizer"]["betas"] == [0.9, 0.95]
    assert values["tasks"][0]["environment"] == {"name": "single_turn"}
    assert ("group_size" in values, "sequences_per_step" in values) == (pipeline == "rl", pipeline == "sft")


def test_the_name_of_a_plug_in_stands_first(recipe):
    algorithm = to_values(load_recipe(recipe()).recipe)["algorithm"]
    assert next(iter(algorithm)) == "name" and algorithm["name"] == "grpo"


def test_files_of_plug_ins_become_absolute(recipe, tmp_path):
    (tmp_path / "mine.py").write_text("def score(response): return 1.0\nclass Engine: ...\n")
    names = ["tasks[0].rewards[0].name=./mine.py:score", "policy.engine=mine.py:Engine"]
    loaded = load_recipe(recipe(), names)
    values = to_values(loaded.recipe, loaded.folder)
    assert values["tasks"][0]["rewards"][0]["name"] == f"{tmp_path}/mine.py:score"
    assert values["policy"]["engine"] == f"{tmp_path}/mine.py:Engine"
    assert values["tasks"][0]["name"] == "a"
