"""Checks that types cannot express: ranges, and relations between fields with their arithmetic."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

import pytest

from rollcli import registry
from rollcli.algorithms import BUILTIN
from rollcli.config.build import hints
from rollcli.config.load import load_recipe, rebuild
from rollcli.config.schema import PIPELINES, RlRecipe
from rollcli.errors import ConfigError

MINE = "from rollcli.algorithms.base import Algorithm\nclass Mine(Algorithm):\n    option = 1\n"


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
        ("tasks[0].weight=-1", "`tasks[0].weight`: must not be negative, is -1.0"),
        ("tasks[0].weight=0", "`tasks[0].weight`: every task has weight 0: there is nothing to train on"),
        (
            "tasks[0].sampling.max_tokens=5000",
            "`tasks[0].sampling.max_tokens`: is 5000, above `rollout.sampling.max_tokens`, 1024, which memory and "
            "context are planned for",
        ),
        (
            "tasks[0].group_size=1",
            "`tasks[0].group_size`: is 1, but `grpo` compares the answers of a group: with one answer every advantage "
            "is 0 and nothing is learned",
        ),
        ("tasks[0].evaluation.top_p=0", "`tasks[0].evaluation.top_p`: must be in (0, 1], is 0.0"),
        ("tasks[0].rewards=[]", "`tasks[0].rewards`: task `a` has no reward: nothing would be learned"),
        (
            "tasks[0].rewards=[{name: math}, {name: qa}, {name: math}]",
            "`tasks[0].rewards[2].name`: reward `math` stands twice in this task; give one of them both weights, "
            "or a `label` of its own",
        ),
        (
            "tasks[0].rewards=[{name: math}, {name: qa, label: math}]",
            "`tasks[0].rewards[1].label`: reward `math` stands twice in this task; give one of them both weights, or a "
            "`label` of its own",
        ),
        ("tasks[0].rewards[0].label=a/b", "`tasks[0].rewards[0].label`: must be a word without `/`, is `a/b`"),
        (
            "reward_models=[{name: j, model: {path: x}}]",
            "`reward_models[0].name`: no reward asks `j`: name it in a reward's `args.model`",
        ),
        (
            "tasks[0].rewards[0]={name: judge, args: {model: j}}",
            "`tasks[0].rewards[0].args.model`: no reward model `j`; the recipe names none",
        ),
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
        ("rollout.max_staleness=-1", "`rollout.max_staleness`: must not be negative, is -1"),
        ("rollout.extra_groups=-1", "`rollout.extra_groups`: must not be negative, is -1"),
        ("rollout.max_restarts_per_hour=-1", "`rollout.max_restarts_per_hour`: must not be negative, is -1"),
        ("rollout.worker_timeout_s=0", "`rollout.worker_timeout_s`: must be greater than 0, is 0.0"),
        ("tasks[0].reward_workers=0", "`tasks[0].reward_workers`: must be greater than 0, is 0"),
        ("tasks[0].rewards[0].retries=-1", "`tasks[0].rewards[0].retries`: must not be negative, is -1"),
        (
            "tasks[0].sampler=hard",
            "`tasks[0].sampler`: expected one of `uniform`, `difficulty`, `curriculum`, found `hard`",
        ),
        (
            "tasks[0].rewards[0].on_error=skip",
            "`tasks[0].rewards[0].on_error`: expected one of `drop`, `drop_group`, `zero`, `fail`, found `skip`",
        ),
        ("rollout.max_prompt_tokens=0", "`rollout.max_prompt_tokens`: must be greater than 0, is 0"),
        ("evaluation.temperature=-1", "`evaluation.temperature`: must not be negative, is -1.0"),
        ("checkpoints.keep_last=0", "`checkpoints.keep_last`: must be greater than 0, is 0"),
        ("checkpoints.keep_every=-2", "`checkpoints.keep_every`: must not be negative, is -2"),
        ("algorithm.clip_low=0", "`algorithm.clip_low`: must be greater than 0, is 0.0"),
        ("algorithm.kl.coefficient=-1", "`algorithm.kl.coefficient`: must not be negative, is -1.0"),
        ("algorithm.shaping.overlong_buffer=0", "`algorithm.shaping.overlong_buffer`: must be greater than 0, is 0.0"),
        ("algorithm.scale=true", "`algorithm.scale`: expected one of `group`, `batch`, `none`, found `true`"),
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


def test_extra_groups_beyond_the_staleness_show_the_arithmetic(recipe):
    asked = ("prompts_per_step=4", "rollout.max_staleness=2", "rollout.extra_groups=9")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe(), asked)
    (problem,) = caught.value.problems
    assert problem.message == (
        "`rollout.extra_groups`: is 9, but 2 max_staleness × 4 prompts_per_step = 8 groups are the most that may be "
        "under way beyond the next batch, or some would be too old when they are trained"
    )
    assert "override 3" in str(problem.location)
    for fine in ("rollout.extra_groups=8", "rollout.extra_groups=0", "rollout.extra_groups=null"):
        assert load_recipe(recipe(), [*asked[:2], fine]).recipe.rollout.max_staleness == 2
    # Synchronous extra groups are aborted, not trained late: any number will do.
    assert load_recipe(recipe(), ["prompts_per_step=4", "rollout.extra_groups=4"]).recipe.rollout.extra_groups == 4
    (message,) = told(recipe, "prompts_per_step=4", "rollout.extra_groups=5")
    assert message.startswith("`rollout.extra_groups`: is 5, above prompts_per_step, 4: groups given up are waited for")


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
    (tmp_path / "mine.py").write_text(MINE)
    assert load_recipe(recipe(), ["group_size=1", "algorithm=./mine.py:Mine"]).recipe.algorithm.name


def test_an_algorithm_of_another_kind_is_told_what_it_lacks(recipe, tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n    needs = prepare = advantages = loss_weights = loss = None\n")
    (message,) = told(recipe, "algorithm=./mine.py:Mine")
    lacking = "keep_group, observe, state, restore, compares_group, demonstrations"
    assert message.startswith(f"`algorithm`: lacks {lacking}: derive its class from")


def test_passes_that_there_is_no_role_for(recipe, tmp_path):
    (tmp_path / "mine.py").write_text(MINE + "    def needs(self): return frozenset({'oracle', 'old'})\n")
    assert told(recipe, "algorithm=./mine.py:Mine") == [
        "`algorithm`: `./mine.py:Mine` needs oracle, which there is no role for"
    ]


def test_a_penalty_without_a_reference(recipe, tmp_path):
    (tmp_path / "mine.py").write_text(MINE + "    kl_coefficient = 0.5\n")
    assert told(recipe, "algorithm=./mine.py:Mine") == [
        "`algorithm`: `./mine.py:Mine` has a KL coefficient, 0.5, but `needs` names no reference"
    ]


@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "sft"])
def test_a_group_of_one_is_refused_where_answers_are_compared(recipe, name):
    cls = registry.resolve("algorithms", name)
    if cls.group_relative:
        assert told(recipe, "group_size=1", f"algorithm={name}")[0].startswith(f"`group_size`: is 1, but `{name}`")
    else:
        assert load_recipe(recipe(), ["group_size=1", f"algorithm={name}"]).recipe.algorithm.name == name


def test_a_group_of_one_is_refused_where_shaping_or_sampling_compares(recipe):
    (shaped,) = told(recipe, "group_size=1", "algorithm={name: reinforce, shaping: {mean: group}}")
    assert shaped.startswith("`group_size`: is 1, but `reinforce` compares the answers of a group")
    (sampled,) = told(recipe, "group_size=1", "algorithm={name: reinforce, dynamic_sampling: true}")
    assert sampled == "`group_size`: is 1: with `dynamic_sampling` every group is of one mind, and refused"


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
    "columns": {"tests": "test_list"},
    "held_out_share": 0.3,
    "max_failure_share": 0.25,
    "group_size": 4,
    "minibatches": 3,
    "clip": [-1.0, 1.5],
    "clip_low": 0.5,
    "min_accuracy": 0.25,
    "max_accuracy": 0.75,
    "place": "loss",
    "old_logprobs": "recompute",
    "estimator": "k1",
    "kind": "judge",
    "args": {"model": "text", "key": 1},
}
"""Values that suit the others; `place` and `old_logprobs` keep their defaults, which the rest depends on."""


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
        return [of_type(members[0], member)]
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


@pytest.mark.parametrize(
    ("key", "value"), [("scale", "batch"), ("correction.old_logprobs", "rollout"), ("aggregation", "token-mean")]
)
def test_keys_that_depend_on_each_other_land_one_by_one(recipe, key, value):
    *block, name = key.split(".")
    found = load_recipe(recipe(), [f"algorithm.{key}={value}"]).recipe.algorithm
    assert getattr(getattr(found, *block) if block else found, name) == value


def judged(recipe, models, *rewards):
    asked = ", ".join(
        f"{{name: {name}, label: {name}{at}, args: {{model: {model}}}}}" for at, (name, model) in enumerate(rewards)
    )
    return told(recipe, f"reward_models=[{models}]", f"tasks[0].rewards=[{asked}]")


def test_reward_models_fit_the_rewards_that_ask_them(recipe):
    model = "model: {path: x}"
    rm = f"{{name: rm, kind: classifier, {model}}}"
    assert judged(recipe, f"{{name: big, {model}}}", ("judge", "bg")) == [
        "`tasks[0].rewards[0].args.model`: no reward model `bg` (did you mean `big`?)"
    ]
    assert judged(recipe, rm, ("judge", "rm")) == [
        "`tasks[0].rewards[0].args.model`: `rm` is a classifier; `judge` asks a judge"
    ]
    assert judged(recipe, f"{rm}, {rm}", ("reward_model", "rm")) == [
        "`reward_models[1].name`: `rm` is already the name of another reward model"
    ]
    wrong = f"{{name: a.b, kind: classifier, {model}, engine: vllm, parallel: {{tensor: 2}}, engine_args: {{x: 1}}}}"
    keys = [each.partition("`:")[0].rpartition(".")[2] for each in judged(recipe, wrong, ("reward_model", "a.b"))]
    assert sorted(keys) == ["engine", "engine_args", "name", "parallel"]


def test_one_function_stands_twice_under_two_labels(recipe):
    two = "tasks[0].rewards=[{name: length, label: long, args: {min_words: 30}}, {name: length}]"
    first, second = load_recipe(recipe(), [two]).recipe.tasks[0].rewards
    assert (first.title, first.args, second.title) == ("long", {"min_words": 30}, "length")


def test_no_more_than_160_keys():
    def count(cls):
        total = 0
        for member in fields(cls):
            hint = hints(cls)[member.name]
            inner = next((item for item in (hint, *get_args(hint)) if is_dataclass(item)), None)
            total += count(inner) if inner else 1
        return total

    assert count(RlRecipe) <= 160
