"""Whole runs on other engines: the same samples, the same first gradient, and a policy that learns as well."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.e2e.conftest import Workspace

pytestmark = pytest.mark.slow
SIZES = (
    "prompts_per_step=16", "group_size=8", "minibatches=2", "steps=4", "evaluation.at_start=false",
    "evaluation.problems_per_task=8", "checkpoints.every=2", "rollout.sync.verify=true", "rollout.max_rows=128",
)  # fmt: skip
GAP = 2e-4
"""float32 on both sides; the sharpest distributions of a tiny model move most by rounding."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of the run on the engines that are built in."""
    workspace = Workspace(tmp_path_factory.mktemp("plain"))
    workspace.roll("train", "grpo-math", *SIZES, "--name", "run")
    return workspace.metrics("run")


PAIRS = {
    "deepspeed, vllm": (
        ("deepspeed", "vllm"),
        ("policy.engine=deepspeed", "policy.engine_args.zero_optimization.stage=2", "policy.workers=2",
         "rollout.engine=vllm", "rollout.replicas=2", "rollout.max_rows=64"),
    ),
    "megatron over two processes, transformers": (
        ("megatron",), ("policy.engine=megatron", "policy.parallel.tensor=2", "rollout.sync.changed_only=true"),
    ),
    "fsdp over two processes, broadcast": (
        (), ("policy.parallel.tensor=2", "rollout.replicas=2", "rollout.sync.transport=broadcast"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_of_engines_trains_as_the_built_in_one(workspace: Any, plain: list[dict[str, Any]], pair: str) -> None:
    packages, overrides = PAIRS[pair]
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    workspace.roll("train", "grpo-math", *SIZES, *overrides, "--name", "run")
    steps = workspace.metrics("run")
    assert len(steps) == 4 and all(step["rollout_gap_max"] < GAP for step in steps)
    first, theirs = steps[0], plain[0]
    # The first samples are the same, token by token, and so is what is learned from them.
    assert first["reward"] == theirs["reward"] and first["length"] == theirs["length"]
    assert first["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert steps[-1]["reward"] > first["reward"] + 0.1


def test_adapters_are_sent_alone_and_a_resumed_run_equals_the_whole_one(workspace: Any) -> None:
    pytest.importorskip("peft")
    given = (*SIZES, "policy.lora.rank=8", "policy.optimizer.learning_rate=3e-3", "algorithm.kl.coefficient=0.01")
    workspace.roll("train", "grpo-math", *given, "--name", "four")
    whole = workspace.metrics("four")
    digests = workspace.digests("four", 4)
    workspace.roll("resume", "four", "--step", "2")
    resumed = workspace.metrics("four")
    assert whole[1]["sync_mib"] < whole[0]["sync_mib"] / 4
    # All is sent again to replicas that start anew.
    assert resumed[2]["sync_mib"] == resumed[0]["sync_mib"] and resumed[3]["sync_mib"] == whole[3]["sync_mib"]
    for step in (*whole, *resumed):
        step.pop("sync_mib")
    assert resumed == whole
    assert workspace.digests("four", 4) == digests
    assert any(name.startswith("adapter/") for name in digests)
    # The policy with its adapters switched off is the reference, and at first equal to it.
    assert abs(whole[0]["kl_reference"]) < 1e-6 < whole[-1]["kl_reference"]
    assert whole[-1]["reward"] > whole[0]["reward"] + 0.1
