"""`--smoke` makes any recipe small and leaves its parts; what it cannot know the recipe says, located as ever."""

from __future__ import annotations

import pytest

from rollcli.config.find import shipped
from rollcli.config.load import load_recipe
from rollcli.config.schema import RlRecipe
from rollcli.config.smoke import smoke_overrides
from rollcli.errors import ConfigError

LARGE = """\
model: {path: some/model, chat_template: plain}
steps: 500
prompts_per_step: 512
group_size: 16
minibatches: 16
tasks:
  - name: a
    source: {name: sums}
    rewards: [{name: math}]
    group_size: 4
    reward_workers: 8
    sampling: {max_tokens: 900}
algorithm: dapo
policy: {engine: megatron, workers: 16, parallel: {tensor: 8}, engine_args: {x: 1}, lora: {rank: 64}}
rollout: {engine: vllm, replicas: 32, engine_args: {gpu_memory_utilization: 0.4}, max_prompt_tokens: 9000}
placement: {policy: 0-3}
"""


def test_sizes_shrink_and_parts_stay(recipe):
    small: RlRecipe = load_recipe(recipe(LARGE), smoke=True).recipe
    assert (small.steps, small.prompts_per_step, small.group_size, small.minibatches) == (2, 2, 2, 2)
    assert small.rollout.sampling.max_tokens == 32 and small.rollout.max_prompt_tokens is None
    assert (small.policy.engine, small.policy.processes, small.policy.engine_args) == ("fsdp", 1, {})
    assert (small.rollout.engine, small.rollout.replicas, small.rollout.engine_args) == ("transformers", 1, {})
    assert small.policy.lora.rank == 2 and small.placement == "auto"
    task = small.tasks[0]
    assert (task.group_size, task.reward_workers, task.sampling.max_tokens) == (None, None, None)
    assert small.algorithm.name == "dapo" and [reward.name for reward in task.rewards] == ["math"]
    assert small.model.path == "embedded:sums" and small.model.initialize["num_hidden_layers"] == 2
    assert (small.checkpoints.every, small.evaluation.every, small.evaluation.problems_per_task) == (1, 1, 2)


def test_what_is_small_already_stays_as_it_is(recipe):
    little = LARGE.replace("steps: 500", "steps: 1").replace("minibatches: 16", "minibatches: 1")
    small = load_recipe(recipe(little), smoke=True).recipe
    assert (small.steps, small.minibatches) == (1, 1)


def test_the_recipes_own_block_comes_after_and_overrides_last(recipe):
    own = LARGE + "smoke:\n  prompts_per_step: 5\n  tasks[0].source.worked_share: 0.5\n"
    own += "  algorithm.dynamic_sampling: false\n"
    small = load_recipe(recipe(own), ["steps=7"], smoke=True).recipe
    assert (small.steps, small.prompts_per_step, small.tasks[0].source.worked_share) == (7, 5, 0.5)
    assert not small.algorithm.dynamic_sampling
    assert load_recipe(recipe(own)).recipe.prompts_per_step == 512, "without --smoke nothing of it counts"


def test_a_wrong_key_of_the_block_is_located(recipe):
    wrong = LARGE + "smoke:\n  prompts_per_stap: 5\n  tasks[3].weight: 1\n  a..b: 1\n"
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe(wrong), smoke=True)
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == 3
    assert "r.yaml:18:3" in told[0] and "prompts_per_stap" in told[0] and "did you mean `prompts_per_step`" in told[0]
    assert "r.yaml:19:3" in told[1] and "no item [3]" in told[1] and "r.yaml:20:3" in told[2]


def test_supervised_recipes_shrink_too():
    keys = dict(smoke_overrides({"pipeline": "sft", "steps": 9, "sequences_per_step": 64, "tasks": []}))
    assert (keys["steps"], keys["sequences_per_step"]) == (2, 4) and not [key for key in keys if "rollout" in key]
    assert "group_size" not in keys and "evaluation.every" not in keys


@pytest.mark.parametrize("name", sorted(path.stem for path in shipped().glob("*.yaml")))
def test_every_recipe_that_ships_is_short_valid_and_shrinks(name):
    path = shipped() / f"{name}.yaml"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
    whole, small = load_recipe(str(path)).recipe, load_recipe(str(path), smoke=True).recipe
    assert small.steps <= 2 and small.model.path == "embedded:sums"
    assert [type(task.source) for task in small.tasks] == [type(task.source) for task in whole.tasks]
    assert [type(task.environment) for task in small.tasks] == [type(t.environment) for t in whole.tasks]
    assert whole.description and "\n" not in whole.description


def test_reward_models_become_small_and_their_nonsense_scores_nothing(recipe):
    rewards = "[{name: judge, args: {model: j}}, {name: reward_model, args: {model: rm}}, {name: math}]"
    own = LARGE.replace("[{name: math}]", rewards)
    own += "reward_models:\n  - {name: j, model: {path: huge}, engine: vllm, replicas: 8, parallel: {tensor: 4}}\n"
    own += "  - {name: rm, kind: classifier, model: {path: huger}}\n"
    small = load_recipe(recipe(own), smoke=True).recipe
    judge, classifier = small.reward_models
    assert (judge.engine, judge.replicas, judge.parallel.processes) == ("transformers", 1, 1)
    assert [model.model.path for model in small.reward_models] == ["embedded:sums"] * 2
    assert classifier.model.initialize["num_labels"] == 1 and "num_labels" not in judge.model.initialize
    assert [reward.on_error for reward in small.tasks[0].rewards] == ["zero", "zero", "drop"]
    assert small.tasks[0].rewards[0].args == {"model": "j", "max_tokens": 32}


def test_reward_models_shrink_to_random_ones_and_their_nonsense_scores_nothing(recipe):
    judged = LARGE.replace("rewards: [{name: math}]", "rewards: [{name: judge, args: {model: grader}}]")
    judged += "reward_models: [{name: grader, model: {path: some/judge}, engine: vllm, replicas: 4}]\n"
    small = load_recipe(recipe(judged), smoke=True).recipe
    model = small.reward_models[0]
    assert (model.engine, model.replicas, model.model.path) == ("transformers", 1, "embedded:sums")
    assert small.tasks[0].rewards[0].on_error == "zero"
