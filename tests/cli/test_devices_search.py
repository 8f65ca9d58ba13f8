"""`roll devices search`: the best placements as text and JSON, a recipe written, and its errors."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
import yaml

from tests.cli.test_devices import QWEN_7B

RECIPE = """\
model: {path: model}
steps: 3
algorithm: {name: grpo, kl: {coefficient: 0}}
rollout: {sampling: {max_tokens: 4096}}
tasks:
  - {name: sums, source: sums, rewards: [{name: math}]}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_7B))
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return "r.yaml"


def search(roll, recipe, *options):
    return roll("devices", "search", recipe, "--gpus", "8xH100-80GB", *options)


def test_ways_are_shown_fastest_first_at_80_columns(roll, recipe):
    result = search(roll, recipe, "--price", "2.5")
    assert result.code == 0
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[0] for line in lines if line[:1].isdigit()] == ["1", "2", "3"]
    assert "costs" in result.out and "assumed" in result.out and "policy.workers=" in result.out
    assert any(set((line.split() or [""])[-1]) <= set("RrULSX.") and len(line) > 60 for line in lines)


def test_json_has_every_number(roll, recipe):
    found = json.loads(search(roll, recipe, "--top", "2", "--json").out)
    first, second = found["choices"]
    assert first["simulation"]["step_s"] <= second["simulation"]["step_s"]
    assert first["settings"]["placement"] and first["free_gib"] >= 0


def test_the_first_way_becomes_a_recipe_and_a_drawing(roll, recipe, tmp_path):
    assert search(roll, recipe, "--write", "mine.yaml", "--svg", "step.svg").code == 0
    written = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert written["policy"]["workers"] >= 1 and written["tasks"][0]["name"] == "sums"
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")
    assert roll("devices", "plan", "mine.yaml", "--gpus", "8xH100-80GB").code == 0
    again = search(roll, recipe, "--write", "mine.yaml")
    assert again.code == 1 and "`mine.yaml` is there already" in again.err


def test_given_lengths_and_constants_count(roll, recipe, tmp_path):
    def step_s(*options):
        return json.loads(search(roll, recipe, "--top", "1", "--json", *options).out)["choices"][0]["simulation"][
            "step_s"
        ]

    short, long = step_s("--lengths", "100"), step_s("--lengths", "lognormal:2000,1.0,4096")
    assert short < long < step_s("--lengths", "8000+lognormal:2000,1.0,4096")
    (tmp_path / "c.yaml").write_text("train_compute: 0.1\n")
    assert step_s("--lengths", "100", "--constants", "c.yaml") > short


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "many"), "are not numbers"),
        (("--price", "-1"), "a price of -1.0"),
        (("--constants", "gone.yaml"), "cannot be read"),
        (("--gpus", "8xH1000"), "H1000"),
        (("--staleness", "0,one"), "not a list of whole numbers"),
    ],
)
def test_what_is_no_number_or_chip_is_said(roll, recipe, options, message):
    result = search(roll, recipe, *options)
    assert result.code in (1, 2) and message in result.err and "Traceback" not in result.err


def test_nothing_fits(roll, recipe):
    result = roll("devices", "search", recipe, "--gpus", "1xL4")
    assert result.code == 1 and "no way fits" in result.out
