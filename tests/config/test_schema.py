"""Checks that types cannot express: ranges, and relations between fields with their arithmetic."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

import pytest

from rollcli import registry
from rollcli.config.build import hints
from rollcli.config.load import load_recipe, rebuild
from rollcli.config.schema import PIPELINES, RlRecipe
from rollcli.errors import ConfigError


def told(recipe, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe(), overrides)
    return [problem.message for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "`steps`: must be greater than 0, is 0"),
        ("seed=-1", "`seed`: must not be negative, is -1"),
        ("model.path=''", "`model.path`: must not be empty"),
        ("tasks=[]", "`tasks`: must name at least one task"),
        ("tasks[0].name=a/b", "`tasks[0].name`: must be a word without `/`, is `a/b`"),
        ("tasks[0].weight=0", "`tasks[0].weight`: must be greater than 0, is 0.0"),
        ("tasks[0].rewards=[]", "`tasks[0].rewards`: task `a` has no reward: nothing would be learned"),
        ("tasks[0].rewards[0].timeout_s=0", "`tasks[0].rewards[0].timeout_s`: must be greater than 0, is 0.0"),
        ("policy.workers=0", "`policy.workers`: must be greater than 0, is 0"),
        ("policy.threads=0", "`policy.threads`: must be greater than 0, is 0"),
        ("policy.optimizer.learning_rate=0", "`policy.optimizer.learning_rate`: must be greater than 0, is 0.0"),
        ("policy.optimizer.warmup_steps=-1", "`policy.optimizer.warmup_steps`: must not be negative, is -1"),
        ("policy.optimizer.betas=[0.9,1.0]", "`policy.optimizer.betas`: must be two numbers in [0, 1), is [0.9, 1.0]"),
        ("rollout.sampling.top_p=0", "`rollout.sampling.top_p`: must be in (0, 1], is 0.0"),
        ("rollout.sampling.top_k=-1", "`rollout.sampling.top_k`: must not be negative, is -1"),
        ("rollout.sampling.max_tokens=0", "`rollout.sampling.max_tokens`: must be greater than 0, is 0"),
        ("rollout.max_failure_share=1.5", "`rollout.max_failure_share`: must be in [0, 1], is 1.5"),
        ("rollout.max_prompt_tokens=0", "`rollout.max_prompt_tokens`: must be greater than 0, is 0"),
        ("evaluation.temperature=-1", "`evaluation.temperature`: must not be negative, is -1.0"),
        ("checkpoints.keep_last=0", "`checkpoints.keep_last`: must be greater than 0, is 0"),
        ("checkpoints.keep_every=-2", "`checkpoints.keep_every`: must not be negative, is -2"),
        ("algorithm.clip_low=0", "`algorithm.clip_low`: must be greater than 0, is 0.0"),
        ("algorithm.kl_coefficient=-1", "`algorithm.kl_coefficient`: must not be negative, is -1.0"),
        (
            "group_size=1",
            "`group_size`: is 1, but `grpo` compares the answers of a group: with one answer every advantage is 0 and "
            "nothing is learned",
        ),
    ],
)
def test_a_value_that_makes_no_sense(recipe, override, message):
    assert told(recipe, override) == [message]


def test_minibatches_show_the_arithmetic(recipe):
    assert told(recipe, "prompts_per_step=2", "group_size=3", "minibatches=7") == [
        "`minibatches`: 2 prompts_per_step × 3 group_size = 6 samples cannot be split into 7 minibatches"
    ]
    assert load_recipe(recipe(), ["prompts_per_step=2", "group_size=3", "minibatches=6"]).recipe.samples_per_step == 6


def test_two_tasks_of_one_name(recipe):
    tasks = "[{name: a, source: sums, rewards: [{name: math}]}, {name: a, source: sums, rewards: [{name: math}]}]"
    assert told(recipe, f"tasks={tasks}") == ["`tasks[1].name`: `a` is already the name of another task"]


def test_an_algorithm_belongs_to_its_pipeline(recipe):
    assert told(recipe, "algorithm=sft") == ["`algorithm`: `sft` learns from demonstrations; it needs `pipeline: sft`"]
    assert told(recipe, "pipeline=sft", "algorithm=grpo") == [
        "`algorithm`: `grpo` learns from rewards; it needs `pipeline: rl`"
    ]
    assert load_recipe(recipe(), ["pipeline=sft"]).recipe.algorithm.name == "sft"


def test_greedy_evaluation_and_pointless_limits_are_allowed(recipe):
    made = load_recipe(recipe(), ["evaluation.temperature=0", "rollout.sampling.top_p=1"]).recipe
    assert made.evaluation.temperature == 0.0


def test_sft_tasks_need_no_reward(recipe):
    assert load_recipe(recipe(), ["pipeline=sft", "tasks[0].rewards=[]"]).recipe.tasks[0].rewards == []


def test_an_algorithm_that_says_nothing_of_groups(recipe, tmp_path):
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    assert load_recipe(recipe(), ["group_size=1", "algorithm=./mine.py:Mine"]).recipe.algorithm.name


def example(cls, skip=()) -> dict[str, Any]:
    """Returns a value for every key of a class, other than the default where the type allows another."""
    values: dict[str, Any] = {}
    for member in fields(cls):
        if not member.init or member.name in skip:
            continue
        kind = member.metadata.get("plugin")
        if kind:
            name = member.metadata["default"] or "dataset"
            target = registry.resolve(kind, name)
            values[member.name] = {"name": name, **example(target)}
        elif "names" in member.metadata:
            values[member.name] = registry.names(member.metadata["names"])[0]
        else:
            values[member.name] = of_type(hints(cls)[member.name], member)
    return values


CHOSEN = {
    "betas": [0.5, 0.75],
    "top_p": 0.5,
    "held_out_share": 0.3,
    "max_failure_share": 0.25,
    "group_size": 4,
    "minibatches": 3,
}


def of_type(hint, member):
    """Returns a value of a hint; of a union, one of its first member."""
    members = [item for item in get_args(hint) if item is not type(None)]
    if member.name in CHOSEN:
        return CHOSEN[member.name]
    if is_dataclass(hint):
        return example(hint)
    if get_origin(hint) is Literal:
        return next(item for item in reversed(members) if item != member.default)
    if get_origin(hint) is list:
        return [example(members[0])]
    if get_origin(hint) is dict:
        return {"key": 1}
    if members:
        return of_type(members[0], member)
    default = 0 if member.default in (MISSING, None) else member.default
    return "text" if hint is str else not default if hint is bool else hint(default + 3.5)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_key_of_the_schema_is_accepted_and_lands_where_it_belongs(pipeline):
    values = example(PIPELINES[pipeline]) | {"pipeline": pipeline}
    made = rebuild(values)
    assert type(made) is PIPELINES[pipeline]

    def same(value, instance):
        if isinstance(value, dict) and not isinstance(instance, dict):
            return all(same(item, getattr(instance, key)) for key, item in value.items())
        if isinstance(value, list):
            return len(value) == len(instance) and all(map(same, value, instance))
        return value == instance

    assert all(same(value, getattr(made, key)) for key, value in values.items())


def test_no_more_than_120_keys():
    def count(cls):
        total = 0
        for member in fields(cls):
            hint = hints(cls)[member.name]
            inner = next((item for item in (hint, *get_args(hint)) if is_dataclass(item)), None)
            total += count(inner) if inner else 1
        return total

    assert count(RlRecipe) <= 120
