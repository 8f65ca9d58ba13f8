"""A run that is interrupted, killed or started again ends with the same bits as one that is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 120.0


def wait_for(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_three_steps_and_three_more_equal_six_of_more_replicas_and_workers(
    undisturbed: tuple[Any, str], workspace: Any
) -> None:
    whole, _ = undisturbed
    # The linear schedule of the recipe depends on the number of steps, so both runs are given a constant one.
    constant = "policy.optimizer.schedule=constant"
    more = ["rollout.replicas=2", "rollout.environment_workers=2", "rollout.max_rows=24", "rollout.reward_workers=2"]
    workspace.roll("train", "grpo-math", *workspace.SMALL, constant, *more, "--name", "six")
    workspace.roll("train", "grpo-math", *workspace.SMALL, constant, "steps=3", "--name", "three")
    workspace.roll("resume", "three", "--steps", "6")
    assert workspace.digests("three", 6) == workspace.digests("six", 6)
    assert workspace.metrics("three") == workspace.metrics("six")
    assert workspace.digests("six", 6) != whole.digests("whole", 6)


def test_ctrl_c_checkpoints_and_resume_ends_with_the_same_bits(undisturbed: tuple[Any, str], workspace: Any) -> None:
    whole, _ = undisturbed
    process = workspace.start("train", "grpo-math", *workspace.SMALL, "--name", "cut")
    wait_for(lambda: len(workspace.events("cut", "step")) >= 3)
    # A terminal sends the signal to every process of the group.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, output
    assert "roll resume cut" in output
    assert output.endswith("\n")
    stopped = workspace.events("cut", "run_finished")[-1]
    assert stopped["status"] == "stopped"
    assert workspace.digests("cut", stopped["steps"])
    workspace.roll("resume", "cut")
    assert workspace.metrics("cut") == whole.metrics("whole")
    assert workspace.digests("cut", 6) == whole.digests("whole", 6)


def test_kill_9_in_the_middle_of_a_step_goes_on_from_the_last_whole_checkpoint(
    undisturbed: tuple[Any, str], workspace: Any
) -> None:
    whole, _ = undisturbed
    process = workspace.start("train", "grpo-math", *workspace.SMALL, "--name", "killed")
    in_fourth_rollout = {"step": 4, "stage": "rollout"}.items()
    wait_for(lambda: any(in_fourth_rollout <= event.items() for event in workspace.events("killed", "stage_started")))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    assert "lost" in workspace.roll("runs", "ls")
    output = workspace.roll("resume")
    assert "killed" in output
    assert workspace.metrics("killed") == whole.metrics("whole")
    assert workspace.digests("killed", 6) == whole.digests("whole", 6)


def test_two_policy_workers_take_the_same_step(undisturbed: tuple[Any, str], workspace: Any) -> None:
    whole, _ = undisturbed
    workspace.roll("train", "grpo-math", *workspace.SMALL, "steps=1", "policy.workers=2", "--name", "two")
    [two], one = workspace.metrics("two"), whole.metrics("whole")[0]
    for name in ("loss", "grad_norm", "entropy", "kl_old", "clip_share"):
        assert abs(two[name] - one[name]) < 1e-5, name
    assert two["trained_tokens"] == one["trained_tokens"]
