"""Published configurations that fit on their devices, and ones that ran out of memory: the plan says the same.

`-s` prints the free memory of the fullest device, of each row.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import yaml

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.config.schema import (
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardConfig,
    RlRecipe,
    RolloutConfig,
    SamplingConfig,
    SftRecipe,
    TaskConfig,
)
from rollcli.devices.facts import facts_from_config
from rollcli.devices.hardware import parse_gpus
from rollcli.devices.plan import plan
from rollcli.devices.shapes import catalogue

DATA = yaml.safe_load((Path(__file__).parent / "published_memory.yaml").read_text())
ROWS, NOT_REPRODUCED = DATA["rows"], DATA["not_reproduced"]
KEYS = {"name", "source", "model", "gpus", "fits", "stated", "assumed", "why", "sft", "grpo"}


def policy_of(said):
    """Returns the policy that a row's block stands for; what it leaves out is as in a recipe."""
    said = dict(said)
    said["parallel"] = ParallelConfig(**said.get("parallel", {}))
    said["lora"] = LoraConfig(**said.get("lora", {}))
    return PolicyConfig(**said)


def recipe_of(row):
    """Returns the recipe of a row: `sft` is a policy's block, `grpo` has `policy`, `rollout` and the batch."""
    if "sft" in row:
        policy = policy_of(row["sft"])
        # As many demonstrations that every worker's pass is filled.
        return SftRecipe(
            model=ModelConfig(row["model"]), tasks=[TaskConfig("demonstrations", source=None)], steps=1, pipeline="sft",
            policy=policy, sequences_per_step=64 * policy.workers,
        )  # fmt: skip
    said = row["grpo"]
    rollout = dict(said["rollout"])
    share, answer = rollout.pop("gpu_memory_utilization"), rollout.pop("max_tokens")
    rollout["parallel"] = ParallelConfig(**rollout.get("parallel", {}))
    return RlRecipe(
        model=ModelConfig(row["model"]),
        tasks=[TaskConfig("problems", source=None, rewards=[RewardConfig("math")])],
        steps=1,
        policy=policy_of(said["policy"]),
        reference=ReferenceConfig(engine_args=said.get("reference")),
        algorithm=Grpo(kl=KlPenalty(coefficient=said.get("kl", 0.0))),
        prompts_per_step=said.get("prompts", 256),
        group_size=said["group"],
        minibatches=said.get("minibatches", 1),
        rollout=RolloutConfig(
            engine="vllm",
            engine_args={"gpu_memory_utilization": share},
            sampling=SamplingConfig(max_tokens=answer),
            **rollout,
        ),
    )


@cache
def planned(name):
    row = next(row for row in ROWS + NOT_REPRODUCED if row["name"] == name)
    facts = facts_from_config(catalogue()[row["model"]], row["model"])
    found = plan(recipe_of(row), parse_gpus(row["gpus"]), facts)
    print(f"\n{name:44} published {'fits' if row['fits'] else 'does not':8}, free {found.free_gib:8.1f} GiB", end="")
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_what_is_published_is_reproduced(row):
    assert planned(row["name"]).fits == row["fits"]


@pytest.mark.parametrize("row", NOT_REPRODUCED, ids=lambda row: row["name"])
def test_what_is_not_reproduced_says_why(row):
    """Once it is, it belongs among the others."""
    assert planned(row["name"]).fits != row["fits"]
    assert row["why"]


def test_there_are_enough_rows_and_each_is_cited():
    assert len(ROWS) >= 20
    assert sum(row["fits"] for row in ROWS) >= 10 and sum(not row["fits"] for row in ROWS) >= 10
    names = [row["name"] for row in ROWS + NOT_REPRODUCED]
    assert len(set(names)) == len(names)
    for row in ROWS + NOT_REPRODUCED:
        source = DATA["sources"][row["source"]]
        assert source["url"].startswith("https://") and source["section"] and row["stated"]
        assert row.keys() <= KEYS
    assert {row["source"] for row in ROWS + NOT_REPRODUCED} == DATA["sources"].keys()
