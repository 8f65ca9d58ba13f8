"""The search: what it proposes fits, is what the recipe then says, and beats what it left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from rollcli import registry
from rollcli.config.load import rebuild
from rollcli.devices import search as module
from rollcli.devices.assignment import role_workers
from rollcli.devices.facts import facts_from_config, model_facts
from rollcli.devices.hardware import cpu, parse_gpus
from rollcli.devices.layout import lay_out
from rollcli.devices.search import Question, frontier, recipe_text, search
from rollcli.devices.simulate import from_recipe, simulate
from rollcli.errors import PlanError
from tests.devices.conftest import TINY

H100 = "8xH100-80GB"


@pytest.fixture
def question(rl, qwen):
    return Question(rl(kl=0.01, prompt=1024, answer=4096), parse_gpus(H100), qwen, staleness=(1,))


def applied(choice, recipe):
    """Returns the recipe with a choice's settings, put in by hand and not by the search."""
    made = recipe
    for key, value in choice.settings.items():
        made = module.changed(made, key, module.ParallelConfig(**value) if key.endswith("parallel") else value)
    return made


def test_what_is_proposed_fits_uses_every_device_and_is_fastest_first(question):
    choices = search(question, 4)
    times = [choice.simulation.step_s for choice in choices]
    assert len(choices) == 4 and times == sorted(times) and times[0] < times[-1]
    assert len({choice.kind for choice in choices}) == 4, "ways that are worth a choice"
    for choice in choices:
        made = applied(choice, question.recipe)
        assert not list(made.problems())
        plan = lay_out(made, question.hardware, question.facts)
        assert plan.fits and {device for devices in plan.assignment.values() for device in devices} == set(range(8))
        assert sum(choice.simulation.devices.values()) == 8
        assert set(choice.settings["placement"]) == {"policy", "reference", "rollout"}


def test_no_split_with_the_same_degrees_is_faster_than_the_first(question):
    best = search(question, 1)[0]
    for trainers in (2, 4, 6):
        made = applied(best, question.recipe)
        made.policy.workers, made.rollout.replicas = trainers, 8 - trainers
        made.policy.parallel, made.rollout.parallel = module.ParallelConfig(), module.ParallelConfig()
        made.placement = {"policy": f"0-{trainers - 1}", "rollout": f"{trainers}-7"}
        made.policy.recompute_activations, made.policy.micro_batch_tokens = True, 4096
        if lay_out(made, question.hardware, question.facts).fits:
            chip = question.hardware.pools[0].chip
            by_hand = simulate(from_recipe(made, question.facts, chip, False, question.prompt_tokens), quick=True)
            assert best.simulation.step_s <= by_hand.step_s * 1.01


def test_staleness_is_only_tried_where_it_is_asked_for(question):
    patient = search(replace(question, staleness=()), 3)
    assert all("rollout.max_staleness" not in choice.settings for choice in patient)
    hasty = search(question, 3)
    assert hasty[0].settings["rollout.max_staleness"] == 1 and "changes what is learned" in hasty[0].why
    assert hasty[0].simulation.step_s < patient[0].simulation.step_s


def test_more_devices_are_never_slower_and_the_frontier_says_so(question):
    found = frontier(question)
    counts = [sum(choice.simulation.devices.values()) for choice in found]
    times = [choice.simulation.step_s for choice in found]
    assert counts[0] == 8 and counts == sorted(counts, reverse=True) and times == sorted(times)


def test_what_fits_nowhere_is_not_proposed(question):
    assert search(replace(question, hardware=parse_gpus("1xL4"))) == []


def test_the_written_recipe_is_the_proposed_one(question, tmp_path):
    choice = search(question, 1)[0]
    values = {
        "model": {"path": "m"}, "steps": 3, "algorithm": "grpo", "policy": {"optimizer": {"learning_rate": 1e-6}},
        "tasks": [{"name": "a", "source": "sums", "rewards": [{"name": "math"}]}],
    }  # fmt: skip
    text = recipe_text(values, choice)
    made = rebuild(yaml.safe_load(text))
    assert made.policy.workers == choice.settings["policy.workers"] and made.policy.optimizer.learning_rate == 1e-6
    assert made.placement == choice.settings["placement"] and text.startswith("# split;")
    assert role_workers(made)["rollout"] == len(choice.plan.assignment["rollout"])


def test_engines_are_spread_by_what_they_can(rl):
    assert set(module.DEGREES) == set(registry.builtin("train_engines"))


@pytest.mark.parametrize(("hardware", "message"), [(cpu(2, 8.0), "nothing to search"), (None, "several kinds")])
def test_what_cannot_be_searched_says_so(rl, hardware, message):
    tiny = facts_from_config(TINY, "tiny")
    hardware = hardware or parse_gpus("2xH100-80GB+2xL40S")
    with pytest.raises(PlanError, match=message):
        search(Question(rl(), hardware, tiny))


def test_mixtures_are_spread_by_their_experts(rl):
    mixture = model_facts("Qwen/Qwen3-30B-A3B")
    best = search(Question(rl(prompt=1024, answer=4096), parse_gpus("4x8xH100-80GB"), mixture), 1)[0]
    assert best.settings["policy.parallel"]["expert"] > 1 and best.plan.fits
