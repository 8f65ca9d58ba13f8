"""Sampling that runs ahead of training, through the real entry point: how old samples are, and that none is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow.parquet
import pytest

STEPS, PROMPTS, SAMPLES = 30, 4, 4
TINY = (
    f"prompts_per_step={PROMPTS}", f"group_size={SAMPLES}", "minibatches=1", f"steps={STEPS}",
    "evaluation.problems_per_task=4", "evaluation.every=0", "evaluation.at_start=false", "checkpoints.every=7",
    "algorithm.dynamic_sampling=true", "rollout.max_group_attempts=40",
)  # fmt: skip
WAIT_S = 240.0


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Waits until `condition` holds, as long as the process runs."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def rows_of(workspace: Any, run: str) -> dict[int, list[dict[str, Any]]]:
    """Returns a run's recorded trajectories by step."""
    files = sorted((workspace.runs / run / "rollouts").glob("step_*.parquet"))
    return {int(file.stem.removeprefix("step_")): pyarrow.parquet.read_table(file).to_pylist() for file in files}


def staleness_of(steps: dict[int, list[dict[str, Any]]]) -> Counter[int]:
    """Returns how many trajectories were how many versions old, by their first sampled token, when trained on."""
    histogram: Counter[int] = Counter()
    for step, rows in steps.items():
        for row in rows:
            sampled = [version for version, mask in zip(row["versions"], row["loss_mask"], strict=True) if mask]
            assert sampled == sorted(sampled)  # a sample that goes on under newer weights
            histogram[step - 1 - sampled[0]] += 1
    return histogram


def cursor_of(workspace: Any, run: str, step: int) -> dict[str, Any]:
    """Returns what a checkpoint says of the draws."""
    path = workspace.runs / run / "checkpoints" / f"step_{step:06d}" / "state.json"
    return json.loads(path.read_text())["cursor"]


def draws_of(steps: dict[int, list[dict[str, Any]]]) -> list[int]:
    """Returns the draws that were trained; each is a whole group in one step."""
    groups = Counter((step, row["index"]) for step, rows in steps.items() for row in rows)
    assert set(groups.values()) == {SAMPLES}
    return [index for _, index in groups]


@pytest.mark.slow
def test_stopped_and_resumed_it_is_never_too_stale_and_trains_every_draw_once(workspace: Any) -> None:
    process = workspace.start("train", "grpo-math", *TINY, "rollout.max_staleness=2", "--name", "ahead")
    wait_for(lambda: len(workspace.events("ahead", "step")) >= 12, process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, output
    stopped = workspace.events("ahead", "checkpoint")[-1]["step"]
    assert 12 <= stopped < STEPS
    waiting = cursor_of(workspace, "ahead", stopped)["pending"]
    workspace.roll("resume", "ahead")

    metrics, steps = workspace.metrics("ahead"), rows_of(workspace, "ahead")
    assert [step["step"] for step in metrics] == sorted(steps) == list(range(1, STEPS + 1))
    histogram = staleness_of(steps)
    assert max(histogram) <= 2 and min(histogram) >= 0 and histogram[1] + histogram[2] > 0, histogram
    assert max(step["staleness_max"] for step in metrics) <= 2

    trained = draws_of(steps)
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    # Every draw was trained, or its group was refused and counted by some step; none waits when the run is over.
    cursor = cursor_of(workspace, "ahead", STEPS)
    refused = sum(step["groups_rejected"] for step in metrics)
    assert cursor["pending"] == [] and cursor["stream"]["sums"]["drawn"] == len(trained) + refused
    assert max(trained) < cursor["stream"]["sums"]["drawn"]
    # What waited when the run was stopped came after it.
    later = {row["index"] for step in range(stopped + 1, STEPS + 1) for row in steps[step]}
    dropped = {index for _, index, _ in waiting} - later
    assert waiting and len(dropped) <= sum(step["groups_rejected"] for step in metrics[stopped:])


@pytest.mark.slow
def test_synchronous_extra_groups_are_given_up_and_nothing_is_lost(workspace: Any) -> None:
    workspace.roll(
        "train", "grpo-math", *TINY, "steps=8", "rollout.extra_groups=4", "algorithm.dynamic_sampling=false",
        "--name", "extra",
    )  # fmt: skip
    metrics, steps = workspace.metrics("extra"), rows_of(workspace, "extra")
    assert len(metrics) == 8 and set(staleness_of(steps)) == {0}
    assert all(0 <= step["groups_aborted"] <= 4 for step in metrics)
    assert sum(step["groups_aborted"] for step in metrics) > 0
    trained = draws_of(steps)
    assert len(trained) == len(set(trained)) == 8 * PROMPTS
    cursor = cursor_of(workspace, "extra", 8)
    pending = [index for _, index, _ in cursor["pending"]]
    assert sorted(trained + pending) == list(range(cursor["stream"]["sums"]["drawn"]))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tasks[0].sampler=difficulty", "task `sums` has `sampler: difficulty`"),
        ("rollout.extra_groups=9", "2 max_staleness × 4 prompts_per_step = 8 groups"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(workspace: Any, override: str, said: str) -> None:
    output = workspace.roll("train", "grpo-math", *TINY, "rollout.max_staleness=2", override, code=1)
    assert said in " ".join(output.split()) and not workspace.runs.exists()
