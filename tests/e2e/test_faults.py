"""Workers killed at random moments: a synchronous run ends with the same bits, an asynchronous one loses no draw."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

pytestmark = pytest.mark.slow
SMALL = (
    "prompts_per_step=4", "group_size=4", "minibatches=2", "steps=20", "checkpoints.every=4",
    "evaluation.at_start=false", "evaluation.every=0", "evaluation.problems_per_task=1", "rollout.replicas=2",
    "rollout.environment_workers=2", "rollout.reward_workers=2", "rollout.max_restarts_per_hour=40",
)  # fmt: skip
ROLES = ("RolloutWorker", "EnvironmentWorker", "RewardWorker")
KILLS = 10
SEED = 4
LIMIT_S = 400.0


def descendants(process: int) -> dict[int, str]:
    """Returns pid and title of every process below one: of this run, and of no other."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True).stdout.splitlines()
    rows = [(int(pid), int(parent), title) for pid, parent, title in (line.split(None, 2) for line in listed)]
    found: dict[int, str] = {process: ""}
    while more := {pid: title for pid, parent, title in rows if parent in found and pid not in found}:
        found |= more
    return found


def workers(process: int, *roles: str) -> list[int]:
    """Returns the processes of a run's workers."""
    titles = descendants(process).items()
    return sorted(pid for pid, title in titles if any(title.startswith(f"ray::{role}") for role in roles))


def train(workspace: Any, name: str, *overrides: str) -> subprocess.Popen[str]:
    return workspace.start("train", "grpo-math", *SMALL, *overrides, "--name", name)


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, output
    return output


def wait_for_steps(workspace: Any, name: str, process: subprocess.Popen[str], steps: int) -> bool:
    """Waits until so many steps are done; False where the run ends before."""
    deadline = time.monotonic() + LIMIT_S
    while len(workspace.events(name, "step")) < steps:
        assert time.monotonic() < deadline, f"step {steps} of `{name}` has not come"
        if process.poll() is not None:
            return False
        time.sleep(0.05)
    return True


def kill_at_random(workspace: Any, name: str, process: subprocess.Popen[str]) -> Counter[str]:
    """Kills a worker every second step, at a random moment; returns how many of each role."""
    luck, killed = random.Random(SEED), Counter()
    for number in range(KILLS):
        if not wait_for_steps(workspace, name, process, 1 + 18 * number // KILLS):
            break
        role = ROLES[number % 3]
        time.sleep(luck.random())
        # Right after a death there may be none of the role; the next moment its successor is there.
        while not (victims := workers(process.pid, role)) and process.poll() is None:
            time.sleep(0.05)
        if victims:
            os.kill(luck.choice(victims), signal.SIGKILL)
            killed[role] += 1
    return killed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.e2e.conftest import Workspace

    workspace = Workspace(tmp_path_factory.mktemp("undisturbed"))
    end(train(workspace, "whole"))
    return workspace


def without_replacements(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns metrics without what counts the deaths themselves."""
    return [{k: v for k, v in row.items() if k not in ("workers_replaced", "episodes_restarted")} for row in metrics]


def test_ten_kills_in_twenty_synchronous_steps_change_no_bit(undisturbed: Any, workspace: Any) -> None:
    process = train(workspace, "hit")
    killed = kill_at_random(workspace, "hit", process)
    output = end(process)
    assert sum(killed.values()) >= KILLS - 2 and set(killed) == set(ROLES), killed
    assert workspace.digests("hit", 20) == undisturbed.digests("whole", 20) != {}
    assert without_replacements(workspace.metrics("hit")) == without_replacements(undisturbed.metrics("whole"))
    # Each is told with its cause; a worker that nobody needed again, or that died anew while it started, is not.
    told = [event["message"] for event in workspace.events("hit", "warning") if "takes its place" in event["message"]]
    assert sum(killed.values()) // 2 <= len(told) <= KILLS
    assert all("was killed (SIGKILL" in message for message in told), told
    assert workspace.metrics("hit")[-1]["workers_replaced"] <= len(told)
    assert "Traceback" not in output


def draws(run: Path) -> Counter[tuple[int, int]]:
    """Returns how often each sample, by its draw and its number, was trained over all steps."""
    trained: Counter[tuple[int, int]] = Counter()
    for path in sorted((run / "rollouts").glob("*.parquet")):
        trained.update((row["index"], row["sample"]) for row in pyarrow.parquet.read_table(path).to_pylist())
    return trained


def test_ten_kills_in_an_asynchronous_run_lose_no_draw_and_train_none_twice(workspace: Any) -> None:
    process = train(workspace, "hit", "rollout.max_staleness=1")
    killed = kill_at_random(workspace, "hit", process)
    end(process)
    # On a fast machine the run may be over before the last kill; eight are as good.
    assert sum(killed.values()) >= KILLS - 2 and set(killed) == set(ROLES), killed
    trained, metrics = draws(workspace.runs / "hit"), workspace.metrics("hit")
    assert len(trained) == 20 * 4 * 4 and set(trained.values()) == {1}
    refused = sum(row["groups_rejected"] for row in metrics)
    assert refused == sum(value for row in metrics for key, value in row.items() if key.startswith("groups_rejected/"))
    # Every draw up to the last trained one was trained, or counted as refused.
    indices = {index for index, _ in trained}
    assert len(indices) == 80 and max(indices) + 1 - len(indices) == refused
    assert max(row["staleness_max"] for row in metrics) <= 1


def test_a_killed_trainer_costs_nothing_once_and_ends_the_run_the_second_time(undisturbed: Any, workspace: Any) -> None:
    process = train(workspace, "once")
    assert wait_for_steps(workspace, "once", process, 6)
    [victim] = workers(process.pid, "TrainWorker")
    os.kill(victim, signal.SIGKILL)
    output = end(process)
    assert workspace.digests("once", 20) == undisturbed.digests("whole", 20)
    assert workspace.metrics("once") == undisturbed.metrics("whole")
    assert "the run goes on from its last checkpoint" in output and "policy-0" in output
    starts = workspace.events("once", "run_started")
    assert [event["attempt"] for event in starts] == [1, 2]

    process = train(workspace, "twice")
    for attempt, steps in ((1, 6), (2, 9)):
        assert wait_for_steps(workspace, "twice", process, steps)
        while len(workspace.events("twice", "run_started")) < attempt:
            time.sleep(0.05)
        [victim] = workers(process.pid, "TrainWorker")
        os.kill(victim, signal.SIGKILL)
        if attempt == 1:
            deadline = time.monotonic() + LIMIT_S
            while len(workspace.events("twice", "run_started")) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    output = end(process, code=1)
    assert "worker `policy-0` died" in output and "roll resume" in output
    assert json.loads((workspace.runs / "twice" / "status.json").read_text())["state"] == "failed"
    assert workspace.digests("twice", 4)
