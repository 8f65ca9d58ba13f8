"""`roll config`."""

from __future__ import annotations

import json

import pytest

from rollcli.algorithms import BUILTIN
from rollcli.cli.config import type_words
from rollcli.registry import resolve
from tests.cli.conftest import GOOD


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
    # Tasks have a block of that name, too: both are named.
    assert "\nrollout.sampling  block\n" in roll("config", "explain", "sampling").out
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
        "error: unknown key `group_sise`\n\nhint: did you mean `group_size`, `tasks.group_size`? run `roll config "
        "explain` to see all\n"
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
    assert "tasks[].rewards[].name  one of choice, code, format," in out


def test_explain_the_name_of_a_plug_in(roll):
    out = roll("config", "explain", "algorithm.name").out
    assert out.startswith(
        f"algorithm.name  one of {', '.join(sorted(BUILTIN))}, default grpo\n    Chooses the plug-in."
    )


RELATIVE = sorted(name for name in BUILTIN if resolve("algorithms", name)().compares_group())
PENALTY = """\
from dataclasses import dataclass
from rollcli.algorithms.base import Algorithm

@dataclass
class Penalized(Algorithm):
    kl_coefficient: float = 0.1
"""


def refused(roll, workplace, line: int, column: int, *texts: str, recipe: str) -> None:
    """Asserts that `roll config validate` ends with 1 and one error, which is at that place and says that."""
    (workplace / "r.yaml").write_text(recipe)
    result = roll("config", "validate", "r.yaml")
    assert result.code == 1 and "Traceback" not in result.err
    (error,) = [text for text in result.err.splitlines() if text.startswith("r.yaml:")]
    assert error.startswith(f"r.yaml:{line}:{column}: "), result.err
    for text in texts:
        assert text in error, result.err


def test_which_algorithms_compare_a_group():
    assert {"grpo", "rloo", "dapo", "gspo", "opo", "dr_grpo"} <= set(RELATIVE)
    assert not {"ppo", "remax", "reinforce", "sft"} & set(RELATIVE)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_of_one_has_nothing_to_compare(roll, workplace, name):
    recipe = GOOD.replace("algorithm: grpo", f"group_size: 1\nalgorithm: {name}")
    refused(roll, workplace, 11, 1, "`group_size`: is 1", f"`{name}` compares the answers of a group", recipe=recipe)


@pytest.mark.parametrize(
    ("algorithm", "line", "column", "texts"),
    [
        ("name: grpo\n  clip_low: -0.2", 13, 3, ("`algorithm.clip_low`", "greater than 0", "-0.2")),
        ("name: ppo\n  clip_high: -1", 13, 3, ("`algorithm.clip_high`", "greater than 0")),
        ("name: ppo\n  value_clip: -1", 13, 3, ("`algorithm.value_clip`", "greater than 0")),
        ("name: gspo\n  aggregation: token-mean", 13, 3, ("`algorithm.aggregation`", "`seq-mean-token-mean`")),
        ("name: grpo\n  kl:\n    coefficient: -1", 14, 5, ("`algorithm.kl.coefficient`", "negative")),
        (
            "name: grpo\n  shaping:\n    overlong_buffer: 0", 14, 5,
            ("`algorithm.shaping.overlong_buffer`", "greater than 0"),
        ),
        (
            "name: grpo\n  correction:\n    mode: mask\n    old_logprobs: rollout", 14, 5,
            ("`algorithm.correction.mode`", "`old_logprobs: rollout`"),
        ),
        (
            "name: grpo\n  correction:\n    mode: clip", 14, 5,
            ("`algorithm.correction.mode`", "`none`, `truncate`, `mask`"),
        ),
        ("name: ppoo", 12, 3, ("`ppoo`", "ppo")),
    ],
)  # fmt: skip
def test_an_algorithm_that_cannot_be_is_refused_where_it_says_so(roll, workplace, algorithm, line, column, texts):
    recipe = GOOD.replace("algorithm: grpo", f"algorithm:\n  {algorithm}")
    refused(roll, workplace, line, column, *texts, recipe=recipe)


@pytest.mark.parametrize(
    ("block", "line", "column", "texts"),
    [
        ("rollout:\n  sampling:\n    temperature: 0", 14, 5, ("`rollout.sampling.temperature`", "greater than 0")),
        ("epochs: 0", 12, 1, ("`epochs`", "greater than 0")),
        ("critic:\n  warmup_steps: -1", 13, 3, ("`critic.warmup_steps`", "negative")),
    ],
)
def test_other_values_that_cannot_be(roll, workplace, block, line, column, texts):
    refused(roll, workplace, line, column, *texts, recipe=f"{GOOD}{block}\n")


def test_a_penalty_without_a_reference_is_refused(roll, workplace):
    (workplace / "mine.py").write_text(PENALTY)
    recipe = GOOD.replace("algorithm: grpo", "algorithm: ./mine.py:Penalized")
    refused(
        roll, workplace, 11, 1, "`algorithm`", "has a KL coefficient, 0.1, but `needs` names no reference",
        recipe=recipe,
    )  # fmt: skip
