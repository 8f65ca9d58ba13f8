"""`roll config`."""

from __future__ import annotations

import json

from rollcli.cli.config import type_words


def test_show_can_be_loaded_again(roll, workplace):
    text = roll("config", "show", "sums", "policy.optimizer.learning_rate=1e-6").out
    assert "learning_rate: 1.0e-06\n" in text
    (workplace / "again.yaml").write_text(text)
    assert roll("config", "show", "again.yaml").out == text


def test_show_as_json(roll):
    assert json.loads(roll("config", "show", "sums", "--json").out)["algorithm"]["name"] == "grpo"


def test_origin(roll):
    found = json.loads(roll("config", "show", "sums", "seed=4", "-o", "group_size=2", "--origin", "--json").out)
    origins = {row["key"]: (row["value"], row["origin"]) for row in found}
    assert origins["steps"] == (10, "recipes/sums.yaml:9")
    assert origins["seed"] == (4, "command line, override 1")
    assert origins["group_size"] == (2, "command line, override 2")
    assert origins["minibatches"] == (1, "default")
    assert origins["algorithm.name"] == ("grpo", "recipes/sums.yaml:11")
    assert origins["algorithm.clip_low"] == (0.2, "default")
    assert origins["tasks[0].rewards[0].name"] == ("math", "recipes/sums.yaml:8")
    assert origins["tasks[0].source.name"] == ("sums", "recipes/sums.yaml:6")


def test_origin_as_a_table(roll):
    lines = roll("config", "show", "sums", "--origin").out.splitlines()
    assert lines[0].split() == ["key", "value", "from"]
    assert ["model.path", "embedded:tiny", "recipes/sums.yaml:3"] in [line.split() for line in lines]


def test_validate(roll):
    assert roll("config", "validate", "sums").out == "ok  recipes/sums.yaml\n"
    assert json.loads(roll("config", "validate", "sums", "--json").out)["valid"] is True
    assert roll("config", "validate", "bad.yaml").code == 1


def test_explain_one_key(roll):
    assert roll("config", "explain", "group_size").out == (
        "group_size  whole number, default 8\n    Answers sampled to each problem.\n"
    )


def test_explain_a_block(roll):
    out = roll("config", "explain", "rollout.sampling").out
    assert out == roll("config", "explain", "sampling").out
    assert "rollout.sampling.temperature  number, default 1.0\n" in out


def test_explain_says_that_lists_are_replaced(roll):
    assert "A list given anew replaces the one before it." in roll("config", "explain", "tasks").out


def test_explain_as_json_and_in_full(roll):
    (found,) = json.loads(roll("config", "explain", "seed", "--json").out)
    assert found == {"key": "seed", "type": "whole number", "default": "0", "doc": "Seed of everything random."}
    assert len(json.loads(roll("config", "explain", "--json").out)) > 60


def test_explain_a_key_that_is_close(roll):
    result = roll("config", "explain", "group_sise")
    assert result.code == 1
    assert result.err == (
        "error: unknown key `group_sise`\n\nhint: did you mean `group_size`? run `roll config explain` to see all\n"
    )


def test_type_words():
    assert type_words("Literal['a', 'b'] | null") == "a | b | null"
    assert type_words("dict[str, Any]") == "dict[text, Any]"
    assert type_words("list[float]") == "list of number"


def test_quiet_leaves_the_value(roll):
    assert roll("config", "explain", "-q", "group_size").out == "8\n"
    assert "rollout.sampling.temperature=1.0\n" in roll("config", "explain", "-q", "rollout.sampling").out
    assert roll("config", "show", "sums", "-q").out == roll("config", "show", "sums").out
    assert "steps  recipes/sums.yaml:9\n" in roll("config", "show", "sums", "-q", "--origin").out


def test_explain_a_list_shows_what_its_items_hold(roll):
    out = roll("config", "explain", "rewards").out
    assert out == roll("config", "explain", "tasks.rewards").out
    assert "tasks[].rewards[].name  one of math, required\n" in out


def test_explain_the_name_of_a_plug_in(roll):
    out = roll("config", "explain", "algorithm.name").out
    assert out.startswith("algorithm.name  one of grpo, sft, default grpo\n    Chooses the plug-in.")
