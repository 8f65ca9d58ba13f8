from dataclasses import dataclass, field

import pytest

from rollcli import registry
from rollcli.config.explain import all_keys, describe, explain, field_docs
from rollcli.config.schema import PIPELINES


@dataclass
class Parent:
    a: int
    """About a,
    on two lines."""
    b: float = 2.5
    no_words: str = "x"


@dataclass
class Child(Parent):
    b: float = 3.5
    """About the child's b."""
    flag: bool = False
    """About the flag."""
    maybe: int | None = None
    """About maybe."""
    parents: list[Parent] = field(default_factory=list)
    """About parents."""


def test_docstrings_of_fields_are_inherited_and_replaced():
    assert field_docs(Child) == {
        "a": "About a,\non two lines.",
        "b": "About the child's b.",
        "flag": "About the flag.",
        "maybe": "About maybe.",
        "parents": "About parents.",
    }


def test_describe():
    found = {doc.key: (doc.type, doc.default) for doc in describe(Child, "x.")}
    assert found["x.a"] == ("whole number", "required")
    assert found["x.b"] == ("number", "3.5")
    assert found["x.flag"] == ("true or false", "false")
    assert found["x.maybe"] == ("int | null", "null")
    assert found["x.no_words"] == ("text", "x")
    assert found["x.parents[].a"] == ("whole number", "required")


def keys(query):
    return [doc.key for doc in explain(query)]


CLIPPED = "dapo dr_grpo gigpo grpo gspo lite_ppo max_rl ppo raft_pp reinforce_pp reinforce_pp_baseline star_po"
CLIP_LOW = [f"algorithm.{{{name}}}.clip_low" for name in CLIPPED.split()]
PROMPTS = [f"tasks[].source.{{{name}}}.prompt" for name in sorted(set(registry.builtin("sources")))]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("group_size", ["group_size"]),
        ("sequences_per_step", ["sequences_per_step"]),
        ("algorithm.clip_low", CLIP_LOW),
        ("clip_low", CLIP_LOW),
        ("algorithm.grpo.clip_low", ["algorithm.{grpo}.clip_low"]),
        ("tau", ["algorithm.{kimi_k15}.tau"]),
        ("algorithm.gspo.kl.estimator", ["algorithm.{gspo}.kl.estimator"]),
        ("tasks[0].source.path", [f"tasks[].source.{{{name}}}.path" for name in ("dataset", "sokoban", "webshop")]),
        ("tasks.weight", ["tasks[].weight"]),
        ("tasks.source.prompt", PROMPTS),
        ("prompt", [*PROMPTS, "tasks[].environment.{duel}.prompt"]),
        ("tasks[].source.{sums}.prompt", ["tasks[].source.{sums}.prompt"]),
        ("source.sums.prompt", ["tasks[].source.{sums}.prompt"]),
        ("algorithm.name", ["algorithm.name"]),
        ("tasks.source.name", ["tasks[].source.name"]),
        ("environment.single_turn", []),
        ("tasks.environment.single_turn", ["tasks[].environment"]),
        ("top_p", ["tasks[].evaluation.top_p", "rollout.sampling.top_p", "evaluation.top_p"]),
        ("no_such_key", []),
    ],
)
def test_explain_finds_a_key_as_people_write_it(query, expected):
    assert keys(query) == expected


def test_explain_a_block_lists_what_is_in_it():
    found = keys("rollout.")
    assert found[0] == "rollout" and "rollout.sampling.top_k" in found and "policy.workers" not in found
    assert len(keys("")) == len({doc.key for cls in PIPELINES.values() for doc in describe(cls)})


def test_every_algorithm_is_offered():
    (doc, *_) = explain("algorithm")
    assert all(name in doc.type for name in registry.names("algorithms")) and doc.default == "grpo"


def test_all_keys_are_written_as_overrides_write_them():
    keys = all_keys()
    assert {"steps", "algorithm.clip_low", "tasks.source.path", "policy.optimizer.learning_rate"} <= set(keys)
    assert not any(mark in key for key in keys for mark in "[]{}")
    assert keys == sorted(set(keys))


def test_a_block_shows_the_options_of_every_plug_in():
    found = keys("tasks")
    assert {*PROMPTS, "tasks[].source.{dataset}.path", "tasks[].source.{reasoning_gym}.dataset"} <= set(found)
    assert keys("tasks[0].source")[1:] == [key for key in found if "source.{" in key]


@pytest.mark.parametrize("query", ["tasks[].source.reasoning_gym", "source.reasoning_gym", "reasoning_gym"])
def test_the_options_of_one_plug_in(query):
    found = keys(query)
    assert len(found) > 2 and all(key.startswith("tasks[].source.{reasoning_gym}.") for key in found)


@pytest.mark.parametrize(
    ("query", "kind"),
    [("algorithm", "algorithms"), ("tasks.environment", "environments"), ("algorithm.name", "algorithms"),
     ("tasks.rewards.name", "rewards"), ("trackers.name", "trackers"), ("rollout.engine", "infer_engines")],
)  # fmt: skip
def test_what_takes_a_name_says_which_there_are(query, kind):
    doc = explain(query)[0]
    assert doc.type == f"one of {', '.join(registry.names(kind))}"
    assert "`./file.py:Name` or `module:Name`" in doc.doc


def test_a_blocks_defaults_are_those_of_what_holds_it():
    found = {doc.key: doc.default for doc in explain("kl.coefficient")}
    assert found["algorithm.{grpo}.kl.coefficient"] == "0.04"
    assert found["algorithm.{ppo}.kl.coefficient"] == "0.02"
    assert found["algorithm.{dapo}.kl.coefficient"] == "0.0"
    assert [doc.default for doc in explain("critic.optimizer.learning_rate")] == ["1e-05"]
    assert [doc.default for doc in explain("policy.optimizer.learning_rate")] == ["1e-06"]
