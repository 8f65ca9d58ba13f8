"""Small whole runs through `launch`, each in a process of its own, with everything around the loop going wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

LIMIT_S = 150
SCRIPT = """
import json, sys
from pathlib import Path
from rollcli.config.load import load_recipe
from rollcli.errors import RollError
from rollcli.pipelines.launch import launch
from rollcli.runs.directory import RunDirectory
recipe, name, grace, *overrides = sys.argv[1:]
directory = RunDirectory.create("run", name)
try:
    outcome = launch(load_recipe(recipe, overrides), directory, grace_s=float(grace))
except RollError as error:
    print(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}))
    sys.exit(1)
print(json.dumps({"state": outcome.state, "step": outcome.step, "reason": outcome.reason, "hint": outcome.hint}))
sys.exit(outcome.exit_code)
"""
RECIPE = """
base: grpo-math
steps: 2
prompts_per_step: 4
group_size: 4
minibatches: 2
evaluation: {{problems_per_task: 8}}
{more}
"""


class Run:
    """One run in a process; its workers and their processes are its children."""

    def __init__(self, folder: Path, more: str = "", *overrides: str, grace: float = 60.0) -> None:
        folder.mkdir(exist_ok=True)
        recipe = folder / "small.yaml"
        recipe.write_text(RECIPE.format(more=more))
        self.path = folder / "runs" / "r"
        variables = {**os.environ, "ROLL_RUNS": str(folder / "runs")}
        variables.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(recipe), "r", str(grace), *overrides], text=True, env=variables,
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def end(self, timeout_s: float = LIMIT_S) -> tuple[int, dict[str, Any]]:
        """Returns exit code and what it said."""
        output, errors = self.process.communicate(timeout=timeout_s)
        assert output.strip(), errors
        return self.process.returncode, json.loads(output.splitlines()[-1])

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        path = self.path / "events.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if kind in (None, event["type"])]

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (found := condition()):
            assert self.process.poll() is None, self.process.communicate()[1][-2000:]
            assert time.monotonic() < deadline, "what was waited for has not happened"
            time.sleep(0.02)
        return found

    def children(self) -> set[int]:
        """Returns every process below the run's, however deep, Ray's included."""
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                facts = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.parent.name)] = int(facts[1])
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found - {self.process.pid}

    def worker(self, name: str) -> int:
        """Returns the process of a worker: the one that writes into its log."""
        log = str((self.path / "logs" / "attempt_1" / f"{name}.log").resolve())
        for pid in self.children():
            try:
                # Others inherit the worker's output; the worker itself is Ray's child and calls itself so.
                if os.readlink(f"/proc/{pid}/fd/1") == log and b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
            except OSError:
                continue
        raise AssertionError(f"the process of `{name}` is not found")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: Any, **options: Any) -> Run:
        runs.append(Run(tmp_path / "work", *arguments, **options))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            for pid in [*run.children(), run.process.pid]:
                os.kill(pid, signal.SIGKILL)
        run.process.communicate()


def gone(pids: set[int]) -> set[int]:
    """Waits until processes have ended; returns those that have not. Dead ones that nobody collects do not count."""

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    deadline = time.monotonic() + 20
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


ENVIRONMENT = '''
import asyncio
from dataclasses import dataclass
from rollcli.environments.base import StepResult


@dataclass
class Faulty:
    """Of four problems one hangs, one raises, and two are played."""

    def __post_init__(self):
        self.kind = 0

    async def reset(self, task):
        self.kind = task.index % 4 if task.seed else 0
        if self.kind == 1:
            raise ValueError("the world is broken")
        return task.messages

    async def step(self, response):
        if self.kind == 2:
            await asyncio.sleep(1e6)
        return StepResult(done=True)

    async def close(self):
        if self.kind == 2:
            raise RuntimeError("cannot be closed")
'''
REWARD = '''
import os
from pathlib import Path


def faulty(response, answer):
    """Of every eight calls one loops, and one each gives NaN, None and two numbers."""
    path = Path(__file__).with_name("calls")
    with path.open("a") as file:
        file.write(".")
    call = path.stat().st_size % 8
    while call == 1:
        pass
    return {2: float("nan"), 3: None, 5: [1.0, 0.0]}.get(call, float(len(response) % 2))
'''


def test_bad_environments_and_rewards_are_data(start, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "work" / "reward.py").write_text(REWARD)
    run = start("""
tasks:
  - {name: sums, source: sums, environment: "./env.py:Faulty", rewards: [{name: "./reward.py:faulty", timeout_s: 0.3}]}
rollout: {max_rows: 64, episode_timeout_s: 2.5, max_failure_share: 0.9, max_group_attempts: 20}
""")
    code, said = run.end()
    assert (code, said["state"], said["step"]) == (0, "finished", 2), said
    kinds: Counter[str] = Counter()
    errors = []
    for path in sorted((run.path / "rollouts").iterdir()):
        table = pq.read_table(path).to_pylist()
        errors += [(row["error_kind"], row["error"]) for row in table if row["error"]]
    metrics = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    for row in metrics:
        kinds.update({key.partition("/")[2]: int(value) for key, value in row.items() if key.startswith("failed/")})
        # Each failure is one of a named kind.
        assert row["failed"] == sum(value for key, value in row.items() if key.startswith("failed/"))
    assert {"environment", "timeout", "reward"} <= set(kinds), kinds
    # Groups whose problem raises or hangs are replaced whole; samples whose reward fails are told from the rest.
    told = " ".join(message for _, message in errors)
    assert "exceeded its limit of 0.3 s" in told and "got nan" in told
    assert "got None" in told or "got list of 2" in told
    (evaluation, *_) = run.events("evaluation")
    assert evaluation["tasks"]["sums"]["failed"] >= 4
    assert (run.path / "checkpoints" / "step_000002" / "complete").is_file()


def test_a_reward_that_is_always_1_ends_at_the_cap_and_keeps_the_checkpoint(start, tmp_path):
    (tmp_path / "work").mkdir()
    # The second step's problems come after the first step's 4.
    (tmp_path / "work" / "reward.py").write_text(
        "from pathlib import Path\n"
        "def score(response):\n"
        "    path = Path(__file__).with_name('calls')\n"
        "    with path.open('a') as file: file.write('.')\n"
        "    size = path.stat().st_size\n"
        "    return 1.0 if size > 16 else float(size % 2)\n"
    )
    run = start(
        """
algorithm: {name: grpo, dynamic_sampling: true}
checkpoints: {every: 1}
tasks:
  - {name: sums, source: sums, rewards: [{name: "./reward.py:score"}]}
rollout: {max_group_attempts: 3}
""",
        "evaluation.at_start=false", "steps=5",
    )  # fmt: skip
    code, said = run.end()
    assert (code, said["error"]) == (1, "RolloutError"), said
    assert "12 groups were sampled for a batch of 4" in said["message"] and "100% all right" in said["message"]
    assert "rollout.max_group_attempts" in said["hint"]
    (end,) = run.events("run_finished")
    assert (end["status"], end["reason"], end["steps"]) == ("failed", said["message"], 1)
    assert (run.path / "checkpoints" / "step_000001" / "complete").is_file()
    assert json.loads((run.path / "status.json").read_text())["state"] == "failed"


def test_a_worker_too_many_ends_the_run_soon_by_name_and_leaves_nothing(start):
    run = start("", "steps=1000", "evaluation.at_start=false", "rollout.max_restarts_per_hour=1")
    for round in (2, 4):
        run.wait_for(lambda round=round: len(run.events("step")) >= round)
        everyone = run.children()
        os.kill(run.worker("rollout-0"), signal.SIGKILL)
        if round == 2:
            run.wait_for(lambda: run.events("warning"))
    began = time.monotonic()
    code, said = run.end(timeout_s=60)
    assert time.monotonic() - began < 30
    assert (code, said["error"]) == (1, "WorkerDied")
    assert "worker `rollout-0` was killed (SIGKILL" in said["message"] and "logs/latest/rollout-0.log" in said["hint"]
    assert "1 workers were replaced in the last hour, and `rollout.max_restarts_per_hour` is 1" in said["message"]
    assert gone(everyone | run.children()) == set()
    (warning,) = [each for each in run.events("warning") if "takes its place" in each["message"]]
    assert warning["message"].startswith("worker `rollout-0` was killed")
    (end,) = run.events("run_finished")
    assert end["status"] == "failed" and "rollout-0" in (run.path / "logs/latest/driver.log").read_text()
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["workers_replaced"] == 0 and steps[-1]["workers_replaced"] == 1


BLOCKING = """
import time
from dataclasses import dataclass
from pathlib import Path
from rollcli.environments.base import StepResult


@dataclass
class Blocking:
    async def reset(self, task):
        self.task = task
        return task.messages

    async def step(self, response):
        # The second problem's first sample that comes here, in the only environment worker, or again in its successor.
        marks = Path(__file__).with_name("marks")
        if self.task.index == 1 and self.task.split == "train":
            marks.mkdir(exist_ok=True)
            first = marks / "first"
            if not first.exists():
                first.write_text(response)
            if first.read_text() == response:
                time.sleep(10**6)
        return StepResult(done=True)

    async def close(self): ...
"""


def test_an_environment_that_blocks_costs_the_guilty_episode_alone(start, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "env.py").write_text(BLOCKING)
    run = start(
        """
tasks:
  - {name: sums, source: sums, environment: "./env.py:Blocking", rewards: [{name: math}]}
rollout: {worker_timeout_s: 4.0, max_failure_share: 0.5}
""",
        "evaluation.at_start=false", "evaluation.problems_per_task=1",
    )  # fmt: skip
    code, said = run.end()
    assert (code, said["state"], said["step"]) == (0, "finished", 2), said
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    # Equal answers of the same problem are guilty, too.
    guilty = steps[0]["failed/blocked"]
    assert 1 <= guilty <= 4 and steps[0]["failed"] == guilty and steps[0]["workers_replaced"] == guilty
    assert steps[0]["episodes_restarted"] >= 1 and steps[1]["failed"] == 0
    told = [event["message"] for event in run.events("warning") if "takes its place" in event["message"]]
    assert len(told) == guilty and all("`environment-0` ended itself: an episode blocked it" in each for each in told)


STUCK = """
import time
from pathlib import Path
from rollcli.engines.transformers import TransformersEngine


class Engine(TransformersEngine):
    def step(self):
        mark = Path(__file__).with_name("stuck")
        if self._stats["steps"] > 60 and not mark.exists():
            mark.touch()
            time.sleep(10**6)
        return super().step()
"""


def test_an_engine_that_hangs_in_a_step_is_replaced(start, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "engine.py").write_text(STUCK)
    run = start(
        "rollout: {worker_timeout_s: 3.0, engine: ./engine.py:Engine}",
        "evaluation.at_start=false", "evaluation.problems_per_task=1",
    )  # fmt: skip
    code, said = run.end()
    assert (code, said["state"]) == (0, "finished"), said
    (told,) = [event["message"] for event in run.events("warning") if "takes its place" in event["message"]]
    assert told.startswith("worker `rollout-0` did nothing for ") and "s and was ended" in told


TROUBLE = """
import asyncio
from dataclasses import dataclass
from pathlib import Path
from rollcli.environments.base import StepResult


@dataclass
class Never:
    async def reset(self, task):
        return task.messages

    async def step(self, response):
        await asyncio.Event().wait()

    async def close(self): ...


@dataclass
class EveryThird(Never):
    async def step(self, response):
        calls = Path(__file__).with_name("steps")
        with calls.open("a") as file:
            file.write(".")
        if calls.stat().st_size % 3 == 0:
            raise ValueError("the third")
        return StepResult(done=True)


def sleeps(response):
    import time
    time.sleep(10**6)
"""


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_endless_environments_raising_ones_and_endless_rewards_end_and_are_counted(start, tmp_path, max_staleness):
    """Beside a task that is well, one of each kind; nothing of theirs that failed is trained."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "trouble.py").write_text(TROUBLE)
    run = start(
        f"""
tasks:
  - {{name: well, source: sums, rewards: [{{name: math}}], weight: 3}}
  - {{name: never, source: sums, environment: "./trouble.py:Never", rewards: [{{name: math}}]}}
  - {{name: third, source: sums, environment: "./trouble.py:EveryThird", rewards: [{{name: math, retries: 2}}]}}
  - name: sleeps
    source: sums
    reward_workers: 2
    rewards: [{{name: math}}, {{name: "./trouble.py:sleeps", timeout_s: 0.2, on_error: drop_group, retries: 3}}]
rollout:
  max_staleness: {max_staleness}
  episode_timeout_s: 3.0
  max_failure_share: 0.9
  max_group_attempts: 20
""",
        "evaluation.at_start=false", "evaluation.problems_per_task=2", "steps=3",
    )  # fmt: skip
    code, said = run.end()
    assert (code, said["state"], said["step"]) == (0, "finished", 3), said
    kinds: Counter[str] = Counter()
    for row in map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()):
        failed = {key.partition("/")[2]: int(value) for key, value in row.items() if key.startswith("failed/")}
        assert row["failed"] == sum(failed.values()) and row["groups_rejected"] >= row["failed"] // 4 - 3
        kinds.update(failed)
    assert kinds["environment"] >= 1 and kinds["timeout"] >= 4, kinds
    names = set()
    for path in sorted((run.path / "rollouts").iterdir()):
        for row in pq.read_table(path).to_pylist():
            names.add(row["task"])
            assert row["error"] is None or row["error_kind"] == "environment"
    assert "well" in names and names <= {"well", "third"}
    logs = {path.name for path in (run.path / "logs" / "latest").iterdir()}
    assert {"reward-0.log", "reward.sleeps-0.log", "reward.sleeps-1.log"} <= logs


HANGS = """
import asyncio
from dataclasses import dataclass
from rollcli.environments.base import StepResult


@dataclass
class Hangs:
    async def reset(self, task):
        self.late = task.index >= 4
        return task.messages

    async def step(self, response):
        if self.late:
            await asyncio.sleep(1e6)
        return StepResult(done=True)

    async def close(self): ...
"""


@pytest.mark.parametrize("second", [False, True])
def test_sigterm_while_sampling(start, tmp_path, second):
    """One signal: the last whole step is saved. One more: it ends at once and nothing new is written."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "env.py").write_text(HANGS)
    # Step 1 ends; step 2 hangs in its environment until the signal comes.
    run = start(
        """
tasks:
  - {name: sums, source: sums, environment: "./env.py:Hangs", rewards: [{name: math}]}
""",
        "evaluation.at_start=false",
    )
    run.wait_for(lambda: sampling(run))
    everyone = run.children()
    if second:
        # A worker that does not answer holds up the checkpoint, which only the second signal cuts short.
        os.kill(run.worker("policy-0"), signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    if second:
        run.wait_for(lambda: [e for e in run.events("stage_started") if e["stage"] == "checkpoint"])
        began = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
    code, said = run.end(timeout_s=60)
    assert (code, said["state"], said["step"]) == (143, "stopped", 1), said
    assert "roll resume r" in said["hint"]
    whole = (run.path / "checkpoints" / "step_000001" / "complete").is_file()
    if second:
        assert time.monotonic() - began < 5 + 5 and not whole and "there is no checkpoint" in said["reason"]
    else:
        assert whole and said["reason"] == "stopped by SIGTERM"
    assert gone(everyone) == set()
    assert json.loads((run.path / "status.json").read_text())["state"] == "stopped"


def sampling(run: Run) -> bool:
    started = [event for event in run.events("stage_started") if event["step"] == 2]
    return bool(started) and started[-1]["stage"] == "rollout"
