"""Replay: the recorded numbers again where nothing is changed, others where something is, refusals that say why.

The first half runs the pipeline on doubles; the second replays a real run in processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rollcli.cli.app import app
from rollcli.config.load import load_recipe
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group
from rollcli.errors import ConfigError, NotFound, ReplayError
from rollcli.pipelines import replay as module
from rollcli.pipelines.origin import origin_of
from rollcli.pipelines.recorder import Recorder
from rollcli.pipelines.replay import ReplayPipeline, check_changes, check_origin, check_recorded, starting_point
from rollcli.pipelines.rl import RlPipeline
from rollcli.pipelines.roles import Roles
from rollcli.pipelines.samples import read_rollouts, write_rollouts
from rollcli.runs.directory import RunDirectory
from rollcli.runs.status import StatusFile
from rollcli.trackers.base import Mirror
from tests.e2e.warm import warm_workers
from tests.pipelines.groups import failed, group, trajectory

RECIPE = """\
base: grpo-math
prompts_per_step: 4
group_size: 4
minibatches: 2
steps: 3
"""


SMALL = ("prompts_per_step=2", "group_size=4", "minibatches=2", "steps=3", "evaluation.at_start=false")


class Trainers:
    """The policy, the reference or the critic, which keep what they are asked."""

    data_ranks = 1

    def __init__(self, role: str, asked: list[str]) -> None:
        self.role, self.asked = role, asked
        self.arguments: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        return 1

    async def all(self, method: str, *arguments: Any) -> None:
        self.asked.append(f"{self.role}.{method}")
        self.arguments.setdefault(method, []).append(arguments)

    async def columns(self, method: str, batch: Batch, *arguments: Any) -> np.ndarray:
        await self.all(method)
        return np.full(int(batch.offsets[-1]), -0.5, np.float32)

    async def each(self, method: str, arguments: list[tuple]) -> list[list[tuple[dict[str, float], np.ndarray]]]:
        ((parts, *_),) = arguments
        await self.all(method, parts)
        measured = {"loss": 0.5, "tokens": 10.0, "learning_rate": 0.1}
        return [[(measured, np.full(int(part.offsets[-1]), -0.5, np.float32)) for part in parts]]


class Sampled(RlPipeline):
    """A pipeline whose groups are made up; it records them as a run does."""

    def connect_rollout(self) -> None:
        self.random = np.random.default_rng(0)

    async def sync_weights(self) -> None: ...

    async def take_devices(self) -> None: ...

    async def roll_out(self) -> list[Group]:
        made = []
        for number in range(self.recipe.prompts_per_step):
            lengths = self.random.integers(1, 9, self.recipe.group_size)
            members = [trajectory(n, 2, [0] * size, reward=float(n % 2)) for n, size in enumerate(lengths)]
            made.append(group("sums", 2 * self.steps_done + number, *members))
            if self.algorithm.greedy_baseline:
                made[-1].greedy = [trajectory(len(members), 2, [0], reward=0.25)]
        return made

    async def record(self, groups: list[Group], batch: Batch, updates: dict[str, float]) -> None:
        step, origin = self.steps_done + 1, origin_of(self.recipe.model, self.steps_done)
        path = self.recorder.directory.rollouts / f"step_{step:06d}.parquet"
        write_rollouts(path, step, groups, batch, origin)


class Surroundings:
    """Recipe, roles and recorder of a pipeline that has no sampler."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.recipe = load_recipe("grpo-math", [*SMALL, *overrides]).recipe
        self.asked: list[str] = []
        self.policy = Trainers("policy", self.asked)
        needs = self.recipe.algorithm.needs()
        reference = Trainers("reference", self.asked) if "reference" in needs else None
        self.roles = SimpleNamespace(
            policy=self.policy, reference=reference, critic=None, reference_model=reference or self.policy
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.directory = RunDirectory(folder)
        status = StatusFile(self.directory.status, recipe="r", steps=self.recipe.steps)
        self.recorder = Recorder(self.directory, status, Mirror([], print))
        status.close()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def recorded(tmp_path: Path, *overrides: str) -> Surroundings:
    """Returns what surrounded a run of three steps."""
    made = Surroundings(tmp_path / "run", *overrides)
    pipeline = Sampled(made.recipe, made.roles, made.recorder)

    async def steps() -> None:
        for _ in range(made.recipe.steps):
            await pipeline.step()
            pipeline.steps_done += 1

    run(steps())
    return made


def replaying(
    tmp_path: Path, made: Surroundings, *overrides: str, **options: Any
) -> tuple[Surroundings, ReplayPipeline]:
    """Returns a replay's surroundings, in which nothing can sample."""
    again = Surroundings(tmp_path / "scratch", *overrides)
    return again, ReplayPipeline(again.recipe, again.roles, again.recorder, made.directory, **options)


def trained_on(made: Surroundings) -> list[list[dict[str, np.ndarray]]]:
    """Returns the columns of every minibatch the policy was updated on, by step."""
    found = []
    for (parts,) in made.policy.arguments["update"]:
        found.append([part.tokens | part.samples for part in parts])
    return found


def test_the_policy_sees_what_it_saw(tmp_path):
    made = recorded(tmp_path)
    again, pipeline = replaying(tmp_path, made)
    before = {path: path.stat().st_mtime_ns for path in made.directory.path.rglob("*")}
    run(pipeline.replay(3))
    assert list(pipeline.measured) == [1, 2, 3]
    assert again.asked == ["policy.logprobs", "policy.update"] * 3
    for minibatches, expected in zip(trained_on(again), trained_on(made), strict=True):
        for columns, wanted in zip(minibatches, expected, strict=True):
            assert columns.keys() == wanted.keys()
            for name in wanted:
                np.testing.assert_array_equal(columns[name], wanted[name], err_msg=name)
    assert {path: path.stat().st_mtime_ns for path in made.directory.path.rglob("*")} == before
    assert not again.directory.checkpoints.exists() and not again.directory.rollouts.exists()


def test_the_loop_reads_only_the_steps_it_is_to_replay(tmp_path):
    made = recorded(tmp_path)
    again, pipeline = replaying(tmp_path, made, "epochs=2", "algorithm.kl.coefficient=0.1")
    pipeline.steps_done = 1
    run(pipeline.replay(2))
    assert again.asked == ["reference.logprobs", "policy.logprobs", "policy.update"]
    assert len(trained_on(again)[0]) == 4 and list(pipeline.measured) == [2]


def test_an_algorithm_whose_data_is_not_there_is_refused(tmp_path):
    made = recorded(tmp_path)
    _, pipeline = replaying(tmp_path, made, "algorithm=remax")
    with pytest.raises(ReplayError, match="`remax` compares with a greedy answer, and step 1 recorded none"):
        run(pipeline.replay(1))
    lonely = [group("sums", 7, trajectory(0, 1, [0]), failed("sums", 7, 1))]
    write_rollouts(made.directory.rollouts / "step_000001.parquet", 1, lonely)
    _, pipeline = replaying(tmp_path, made)
    with pytest.raises(ReplayError, match="compares the answers of a group, and `sums/7` of step 1 has 1"):
        run(pipeline.replay(1))
    _, pipeline = replaying(tmp_path, made, "algorithm=reinforce_pp")
    run(pipeline.replay(1))


def test_a_greedy_baseline_is_replayed(tmp_path):
    made = recorded(tmp_path, "algorithm=remax")
    groups = read_rollouts(made.directory.rollouts / "step_000002.parquet")
    assert all(each.greedy and len(each.trajectories) == 4 for each in groups)
    again, pipeline = replaying(tmp_path, made, "algorithm=remax")
    run(pipeline.replay(3))
    rewards = [columns["greedy_reward"] for columns in trained_on(again)[1]]
    assert not np.isnan(np.concatenate(rewards)).any()
    for minibatches, expected in zip(trained_on(again), trained_on(made), strict=True):
        for columns, wanted in zip(minibatches, expected, strict=True):
            np.testing.assert_array_equal(columns["advantages"], wanted["advantages"])


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A checkpoint of step 1 of an algorithm that has learned two things."""
    folder = tmp_path / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    state = {"kl": {"coefficient": 0.5}, "shaping": {"count": 3, "mean": 1.0, "squares": 2.0}}
    (folder / "state.json").write_text(json.dumps({"step": 1, "algorithm": state}))
    return folder


@pytest.mark.parametrize(
    ("changed", "kept", "told"),
    [
        ((), {"kl", "shaping"}, None),
        (("algorithm.clip_high", "epochs"), {"kl", "shaping"}, None),
        (("algorithm.kl.coefficient",), {"shaping"}, "kl"),
        (("algorithm.name",), set(), "kl, shaping"),
    ],
)
def test_a_changed_block_does_not_go_on_from_what_the_old_one_learned(tmp_path, checkpoint, changed, kept, told):
    said: list[str] = []
    made, pipeline = replaying(tmp_path, Surroundings(tmp_path / "run"), changed=changed, tell=said.append)
    fresh = made.recipe.algorithm.state()
    run(pipeline.restore(checkpoint))
    learned = json.loads((checkpoint / "state.json").read_text())["algorithm"]
    assert made.recipe.algorithm.state() == {block: (learned if block in kept else fresh)[block] for block in learned}
    assert said == ([] if told is None else [f"what the algorithm had learned starts afresh: {told}"])
    assert pipeline.steps_done == 1 and made.policy.arguments["load"] == [(str(checkpoint),)]


@pytest.mark.parametrize(
    ("there", "changed", "loaded"), [(True, (), True), (False, (), False), (True, ("critic.path",), False)]
)
def test_a_critic_goes_on_where_the_checkpoint_has_it(tmp_path, checkpoint, there, changed, loaded):
    said: list[str] = []
    made, pipeline = replaying(tmp_path, Surroundings(tmp_path / "run"), changed=changed, tell=said.append)
    made.roles.critic = Trainers("critic", made.asked)
    if there:
        (checkpoint / "critic").mkdir()
    run(pipeline.restore(checkpoint))
    assert made.roles.critic.arguments.get("load") == ([(str(checkpoint / "critic"),)] if loaded else None)
    assert bool(said) is not loaded


def loaded(tmp_path: Path, *overrides: str):
    (tmp_path / "r.yaml").write_text(RECIPE)
    return load_recipe(str(tmp_path / "r.yaml"), overrides)


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("algorithm.clip_high=0.4", ["algorithm.clip_high"]),
        ("minibatches=4", ["minibatches"]),
        ("epochs=2", ["epochs"]),
        ("policy.optimizer.learning_rate=1e-3", ["policy.optimizer.learning_rate"]),
        ("critic.warmup_steps=2", ["critic.warmup_steps"]),
        ("model.dtype=bfloat16", ["model.dtype"]),
        ("minibatches=2", []),
        ("rollout.sampling.temperature=1.0", []),
    ],
)
def test_what_may_change(tmp_path, override, keys):
    assert check_changes(loaded(tmp_path), loaded(tmp_path, override)) == keys


def test_an_algorithm_may_be_another(tmp_path):
    for override in ("algorithm=dapo", "algorithm.name=dapo"):
        assert "algorithm.name" in check_changes(loaded(tmp_path), loaded(tmp_path, override))


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.path=embedded:smollm2", "the rollouts are tokens of `embedded:sums`"),
        ("model.chat_template=plain", "the rollouts are tokens of `embedded:sums`"),
        ("rollout.sampling.temperature=0.5", "the rollouts were sampled at 1.0, .* so it cannot be 0.5"),
        ("rollout.sampling.top_p=0.5", "would change nothing about them"),
        ("group_size=8", "would change nothing about them"),
        ("tasks[0].rewards[0].weight=2", "would change nothing about them"),
        ("seed=2", "would change nothing about them"),
        ("policy_=1", "unknown key"),
    ],
)
def test_what_may_not_change_says_where_it_stands_and_why(tmp_path, override, why):
    with pytest.raises(ConfigError, match=why) as caught:
        check_changes(loaded(tmp_path), loaded(tmp_path, "epochs=2", override))
    (problem,) = caught.value.problems
    assert problem.location == "command line, override 2"
    assert override.partition("=")[0] in problem.message


def test_all_refusals_come_at_once_in_the_order_of_the_overrides(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_changes(loaded(tmp_path), loaded(tmp_path, "seed=2", "group_size=8", "model.path=embedded:smollm2"))
    assert [problem.line for problem in caught.value.problems] == [1, 2, 3]
    assert "`algorithm`, `minibatches`" in caught.value.hint


def checkpoints(directory: RunDirectory, *steps: int) -> None:
    from rollcli.checkpoints import store

    for step in steps:
        with store.writing(directory.checkpoints, step, {"step": step}) as beside:
            (beside / "weights").write_text("w")


def test_it_starts_from_the_newest_whole_checkpoint_before_the_step(tmp_path):
    directory = RunDirectory(tmp_path)
    assert starting_point(directory, 4) == (0, None, [])
    checkpoints(directory, 2, 4, 6)
    assert starting_point(directory, 7)[0] == 6 and starting_point(directory, 4)[0] == 2
    assert starting_point(directory, 2) == (0, None, [])
    (directory.checkpoints / "step_000004" / "weights").write_text("v")
    step, path, skipped = starting_point(directory, 5)
    assert (step, path.name) == (2, "step_000002")
    assert skipped == ["checkpoint of step 4 is damaged (`weights` has changed); passed over"]


def test_a_checkpoint_in_the_making_is_left_alone(tmp_path):
    directory = RunDirectory(tmp_path)
    checkpoints(directory, 2, 4)
    (directory.checkpoints / "step_000004").rename(directory.checkpoints / "step_000004.old")
    (directory.checkpoints / "step_000006.tmp").mkdir()
    assert starting_point(directory, 9)[0] == 2
    assert {path.name for path in directory.checkpoints.iterdir()} == {
        "step_000002", "step_000004.old", "step_000006.tmp",
    }  # fmt: skip


def test_a_step_that_was_not_recorded_names_those_that_were(tmp_path):
    directory = RunDirectory(tmp_path / "x")
    with pytest.raises(NotFound, match="run `x` has no recorded rollouts of step 4") as caught:
        check_recorded(directory, [4], [4])
    assert caught.value.hint == "it has none yet"
    for step in (1, 2, 3, 7):
        write_rollouts(directory.rollouts / f"step_{step:06d}.parquet", step, [])
    check_recorded(directory, [1, 2, 3], [2, 3])
    with pytest.raises(NotFound) as caught:
        check_recorded(directory, [2, 3, 4], [3, 4])
    assert caught.value.hint == "it has those of steps 1-3,7"
    with pytest.raises(NotFound, match="of step 6, which step 7 follows after its checkpoint"):
        check_recorded(directory, [6, 7], [7])


def test_a_file_that_does_not_say_what_it_is_is_refused(tmp_path):
    model = load_recipe("grpo-math").recipe.model
    path = tmp_path / "a.parquet"
    write_rollouts(path, 1, [], origin=origin_of(model, 0))
    check_origin(path, model, 0)
    with pytest.raises(ReplayError, match="they belong to version 0 of the policy, not 1"):
        check_origin(path, model, 1)
    write_rollouts(path, 1, [])
    with pytest.raises(ReplayError, match="does not say which model and version"):
        check_origin(path, model, 0)


@pytest.mark.parametrize(
    ("override", "roles"),
    [
        ("epochs=1", ["policy"]),
        ("algorithm.kl.coefficient=0.1", ["policy", "reference"]),
        ("algorithm=ppo", ["policy", "reference", "critic"]),
    ],
)
def test_only_what_trains_is_started(monkeypatch, override, roles):
    monkeypatch.setattr("rollcli.pipelines.roles.Cluster", lambda worker, specs, *_, **__: specs[0])
    started = Roles(load_recipe("grpo-math", [override]).recipe, {}, None, None, {}, sample=False)
    assert [spec.role for spec in started.all] == roles


def test_trained_roles_have_the_devices_however_many_replicas_there_were(monkeypatch):
    import ray

    recipe = load_recipe("grpo-math", ["rollout.replicas=8", "policy.workers=2", "algorithm.kl.coefficient=1"]).recipe
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 2.0})
    assert module._assignment(recipe) == {"policy": [0, 1], "reference": [0, 1]}
    monkeypatch.setattr(ray, "cluster_resources", dict)
    assert module._assignment(recipe) == {}


def test_a_run_without_rollouts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLL_RUNS", str(tmp_path))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "status.json").write_text("{}")
    (tmp_path / "x" / "config.yaml").write_text("base: sft-tiny\n")
    with pytest.raises(ConfigError, match="run `x` has no rollouts: it learned from demonstrations"):
        module.replay("x", (1, 1))


class Runs:
    """A folder of real runs, and `roll` in a process, which is to end with a code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "ROLL_RUNS": str(folder), "NO_COLOR": "1"}
        self.environment.pop("RAY_ADDRESS", None)

    def roll(self, *words: str, code: int = 0) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "rollcli.cli.app", *words], capture_output=True, text=True, timeout=240,
            env=self.environment,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout, done.stderr

    def roll_here(self, *words: str) -> tuple[str, str]:
        """The same in this process, with workers that are there already."""
        done = CliRunner().invoke(app, list(words), prog_name="roll", env={"ROLL_RUNS": str(self.folder)})
        assert done.exit_code == 0, done.stderr
        return done.stdout, done.stderr

    def contents(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """A run of three steps with checkpoints of steps 1 and 3, whose adapted KL coefficient is part of its state."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    made.roll(
        "train", "grpo-math", "prompts_per_step=4", "group_size=4", "minibatches=2", "steps=3", "--name", "r",
        "evaluation.at_start=false", "evaluation.problems_per_task=4", "checkpoints.every=1", "checkpoints.keep_last=9",
        "algorithm.kl={coefficient: 0.1, target: 0.01, horizon: 20}", "-qq",
    )  # fmt: skip
    shutil.rmtree(made.folder / "r" / "checkpoints" / "step_000002")
    return made


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    with warm_workers():
        yield


def test_without_overrides_every_number_is_the_recorded_one_and_the_run_is_untouched(runs):
    before = runs.contents()
    output, said = runs.roll("replay", "r", "--step", "2-3", "--json")
    found = json.loads(output)
    assert said == "" and (found["start"], found["equal"]) == (1, True)
    lines = [json.loads(line) for line in (runs.folder / "r" / "metrics.jsonl").read_text().splitlines()]
    for step, line in zip(found["steps"], lines[1:], strict=True):
        assert step["step"] == line["step"] and step["differing"] == []
        assert step["replayed"] == step["recorded"] == {name: line[name] for name in step["replayed"]}
        expected = {"loss", "grad_norm", "entropy", "kl_old", "clip_share", "kl_reference", "kl_coefficient"}
        assert expected | {"rollout_gap_mean", "learning_rate"} <= step["replayed"].keys()
    assert runs.contents() == before


def test_from_the_starting_model_and_over_steps_that_lead_there(runs, warm):
    # Nothing is said by --json; `-v` is not needed to learn what is done.
    output, said = runs.roll_here("replay", "r", "--step", "1")
    assert said.startswith("replaying step 1 of `r` from the starting model\n")
    assert said.endswith("\nevery number equals the recorded one\n") and output.startswith("step 1\nmetric ")
    output, said = runs.roll_here("replay", "r", "--step", "3", "-o", "minibatches=2")
    assert said.startswith("replaying step 3 of `r` from the checkpoint of step 1, which takes step 2 as well\n")
    assert said.endswith("\nevery number equals the recorded one\n") and "step 2" not in output


@pytest.mark.parametrize(
    ("override", "differing"),
    [("algorithm.clip_high=1e-6", {"clip_share", "loss", "grad_norm"}), ("algorithm=dr_grpo", {"loss", "grad_norm"})],
)
def test_other_settings_give_other_numbers_on_equal_data(runs, warm, override, differing):
    found = json.loads(runs.roll_here("replay", "r", "--json", "--step", "2", override)[0])
    (step,) = found["steps"]
    assert not found["equal"] and differing <= set(step["differing"])
    # The same tokens, and the same policy before its first update.
    assert "trained_tokens" not in step["differing"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": "0" * 16, "model_path": "org/other"}, "their model is `org/other` (0000000000000000), not `emb"),
        ({"tokenizer": "0" * 16}, "their tokenizer is another one (0000000000000000, not "),
        ({"version": "0.0.1"}, "rollcli 0.0.1 recorded them, this is "),
        ({"policy_version": "0"}, "they belong to version 0 of the policy, not 1"),
    ],
)  # fmt: skip
def test_rollouts_of_another_model_tokenizer_or_version_are_refused(runs, tmp_path, monkeypatch, changed, told):
    shutil.copytree(runs.folder / "r", tmp_path / "r", symlinks=True)
    monkeypatch.setenv("ROLL_RUNS", str(tmp_path))
    path = tmp_path / "r" / "rollouts" / "step_000002.parquet"
    table = pq.read_table(path)
    edited = {f"rollcli.{name}".encode(): value.encode() for name, value in changed.items()}
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **edited}), path)
    with pytest.raises(ReplayError) as caught:
        module.replay("r", (2, 2))
    assert caught.value.message.count(told) == 1 and str(path) in caught.value.message
    assert ";" not in caught.value.message


def test_exit_codes(runs):
    _, said = runs.roll("replay", "r", "--step", "4", code=1)
    assert said == "error: run `r` has no recorded rollouts of step 4\n\nhint: it has those of steps 1-3\n"
    _, said = runs.roll("replay", "r", "--step", "2", "rollout.sampling.temperature=0.5", code=1)
    assert "command line, override 1: `rollout.sampling.temperature`" in said
