"""Every algorithm learns the embedded task, and one with all the state there is goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rollcli.algorithms import BUILTIN
from tests.e2e.warm import run_here, warm_workers

pytestmark = pytest.mark.slow
RECIPE = """\
model: {path: "embedded:sums"}
seed: 1
steps: 3
prompts_per_step: 32
group_size: 8
minibatches: 2
tasks:
  - name: sums
    source: sums
    rewards: [{name: math}]
policy:
  optimizer: {learning_rate: 2.0e-4}
critic:
  optimizer: {learning_rate: 2.0e-4}
rollout:
  max_rows: 512
  sampling: {max_tokens: 48}
evaluation: {at_start: false, problems_per_task: 8}
"""
MORE: dict[str, tuple[str, ...]] = {}
"""What an algorithm needs beside the recipe to learn in so few steps."""
RISE = 0.1
"""Three standard errors of the mean reward of a step's 256 answers, of which 3 in 8 are right at the start."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """One Ray, and workers, for all runs: starting them for each takes longer than the steps."""
    with warm_workers() as address:
        yield address


@pytest.fixture
def train(workspace: Any, address: str, tmp_path: Any) -> Any:
    """Runs the recipe under a name, with overrides."""
    (tmp_path / "sums.yaml").write_text(RECIPE)
    workspace.environment["RAY_ADDRESS"] = address

    def run(name: str, *overrides: str) -> None:
        outcome = run_here(workspace.runs, tmp_path / "sums.yaml", name, *overrides)
        assert outcome.state == "finished", outcome

    return run


@pytest.mark.parametrize("name", sorted(set(BUILTIN) - {"sft"}))
def test_it_learns(workspace: Any, train: Any, name: str) -> None:
    train(name, f"algorithm.name={name}", *MORE.get(name, ()))
    rewards = [step["reward"] for step in workspace.metrics(name)]
    assert len(rewards) == 3 and rewards[-1] > rewards[0] + RISE, rewards


def test_two_steps_of_ppo_and_two_more_equal_four(workspace: Any, train: Any) -> None:
    ppo = (
        "algorithm={name: ppo, kl: {coefficient: 0.02, target: 0.01, horizon: 500}, shaping: {mean: running}}",
        "critic.warmup_steps=1",
        "epochs=2",
    )
    train("four", *ppo, "steps=4")
    train("two", *ppo, "steps=2")
    workspace.roll("resume", "two", "--steps", "4")
    whole, resumed = workspace.metrics("four"), workspace.metrics("two")
    assert resumed == whole
    digests = workspace.digests("four", 4)
    assert {"model/model.safetensors", "optimizer.safetensors"} <= digests.keys()
    assert {"critic/model/model.safetensors", "critic/optimizer.safetensors"} <= digests.keys()
    assert workspace.digests("two", 4) == digests != workspace.digests("two", 2)
    # The state that only the checkpoint carries has moved: else this would prove nothing about it.
    assert len({step["kl_coefficient"] for step in whole[1:]}) == 3
