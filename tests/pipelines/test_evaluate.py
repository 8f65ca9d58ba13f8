"""Evaluation: intervals and pass@k against independent values, failures counted as wrong."""

import asyncio
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollcli.algorithms.grpo import Grpo
from rollcli.config.load import LoadedRecipe
from rollcli.config.schema import (
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    RewardModelConfig,
    RlRecipe,
    TaskConfig,
    TaskEvaluationConfig,
    TaskSamplingConfig,
)  # fmt: skip
from rollcli.data.carriers import Group, Task, Trajectory
from rollcli.data.sources.sums import SumsSource
from rollcli.engines.base import SamplingParams
from rollcli.pipelines.evaluate import (
    Evaluation,
    _devices,
    _keep_task,
    evaluate_policy,
    held_out,
    pass_at_k,
    summarize,
    wilson,
)


def group(accuracies: list[float | None], name: str = "t", index: int = 0, tokens: int = 3) -> Group:
    """One problem's answers; None is a failed episode."""
    task = Task(name, index, [{"role": "user", "content": f"{name} {index}"}])
    members = []
    for sample, accuracy in enumerate(accuracies):
        if accuracy is None:
            members.append(Trajectory.failed(task, sample, "timeout", "too slow"))
            continue
        ids = np.arange(tokens + 1, dtype=np.int32)
        members.append(Trajectory(
            task.id, sample, ids, ids > 0, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32),
            reward=accuracy, accuracy=accuracy, stop_reason="length" if tokens > 5 else "stop",
        ))  # fmt: skip
    return Group(task, members)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        # 0 of n: z² / (n + z²); half of n: 1/2 ± z / 2√(n + z²); the last: Newcombe, Statistics in Medicine 17, 1998.
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (5, 10, 0.2365931, 0.7634069),
        (1, 1, 0.2065493, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right / count, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("share", "count"), [(0.3, 20), (0.01, 1319), (0.5, 3)])
def test_wilson_bounds_are_where_the_normal_test_turns(share: float, count: int) -> None:
    for bound in wilson(share, count):
        assert abs(share - bound) / math.sqrt(bound * (1 - bound) / count) == pytest.approx(1.959964)


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    for samples in range(1, 8):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                draws = list(itertools.combinations([1] * right + [0] * (samples - right), k))
                share = sum(any(draw) for draw in draws) / len(draws)
                assert pass_at_k(samples, right, k) == pytest.approx(share)
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - (100 * 99 * 98) / (200 * 199 * 198))


def test_summary_by_hand() -> None:
    facts = summarize([group([1, 0, 0, 0]), group([1, 1, 0, 0], tokens=9), group([0, 0, 0, 0])])
    assert facts["accuracy"] == pytest.approx(0.25)
    assert (facts["accuracy_low"], facts["accuracy_high"]) == pytest.approx(wilson(0.25, 3))
    assert facts["pass@1"] == pytest.approx(0.25)
    assert facts["pass@2"] == pytest.approx((3 / 6 + 5 / 6 + 0) / 3)
    assert facts["pass@4"] == pytest.approx(2 / 3)
    assert (facts["problems"], facts["samples"], facts["failed"]) == (3, 4, 0)
    assert facts["length"] == pytest.approx(5) and facts["truncated"] == pytest.approx(1 / 3)
    assert "pass@8" not in facts and "pass@3" not in facts


def test_failed_episodes_are_wrong_and_counted() -> None:
    facts = summarize([group([1, None]), group([None, None])])
    assert facts["accuracy"] == 0.25 and facts["pass@1"] == 0.25 and facts["pass@2"] == 0.5
    assert facts["failed"] == 3 and facts["length"] == 3 and facts["truncated"] == 0
    nothing = summarize([group([None])])
    assert nothing["accuracy"] == 0 and nothing["length"] == 0 and nothing["failed"] == 1


def recipe(**evaluation) -> RlRecipe:
    tasks = [TaskConfig(name, SumsSource()) for name in ("a", "b")]
    return RlRecipe(ModelConfig("m"), tasks, 1, algorithm=Grpo(), evaluation=EvaluationConfig(**evaluation))


def test_held_out_problems_are_always_the_same_and_never_trained_on() -> None:
    tasks = [task for task, _ in held_out(recipe(problems_per_task=5))]
    assert [task.id for task in tasks] == [f"{name}/test/{index}" for name in "ab" for index in range(5)]
    assert tasks == [task for task, _ in held_out(recipe(problems_per_task=5))]
    held = SumsSource().open("train", 0)
    trained = {held[index].messages[0]["content"] for index in range(200)}
    assert not trained & {task.messages[0]["content"] for task in tasks}


def test_small_data_sets_give_all_they_have(tmp_path: Path) -> None:
    from rollcli.data.sources.dataset import DatasetSource

    for split, count in (("train", 9), ("test", 3)):
        rows = [json.dumps({"question": f"{split} {n}", "answer": str(n)}) for n in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    small = recipe(problems_per_task=64)
    small.tasks = [TaskConfig("d", DatasetSource(str(tmp_path)))]
    shown = [task.messages[0]["content"] for task, _ in held_out(small)]
    assert shown == ["test 0", "test 1", "test 2"]


@pytest.mark.parametrize(("temperature", "used"), [(None, 1.0), (0.0, 0.0), (0.6, 0.6)])
def test_policy_is_evaluated_by_the_recipes_block(temperature: float | None, used: float) -> None:
    asked = SimpleNamespace()

    async def run_all(orders):
        asked.samples, asked.temperature = len(orders[0][1]), orders[0][1][0].temperature
        return [group([float(task.name == "a")] * len(ways), task.name, task.index) for task, ways in orders]

    wanted = recipe(problems_per_task=3, samples=2, temperature=temperature)
    result = asyncio.run(evaluate_policy(SimpleNamespace(run_all=run_all), wanted))
    assert (asked.samples, asked.temperature) == (2, used)
    assert {name: facts["accuracy"] for name, facts in result.tasks.items()} == {"a": 1.0, "b": 0.0}
    assert result.accuracy == 0.5 and len(result.groups) == 6


def test_a_task_may_be_evaluated_in_its_own_way() -> None:
    wanted = recipe(problems_per_task=4, samples=2, temperature=0.0, max_tokens=30)
    wanted.tasks[0].evaluation = TaskEvaluationConfig(count=1, samples=8, temperature=0.6, top_p=0.9)
    wanted.tasks[0].sampling = TaskSamplingConfig(max_tokens=20, stop=["!"])
    wanted.tasks[1].evaluation = TaskEvaluationConfig(max_tokens=70)
    orders = held_out(wanted)
    assert [task.name for task, _ in orders] == ["a", "b", "b", "b", "b"]
    assert orders[0][1] == [SamplingParams(30, 0.6, 0.9, stop=("!",))] * 8, "the evaluation's budget, the task's texts"
    assert orders[1][1] == [SamplingParams(70, 0.0, stop=())] * 2
    wanted.tasks[0].evaluation = TaskEvaluationConfig(count=0)
    assert {task.name for task, _ in held_out(wanted)} == {"b"}


def test_players_of_an_episode_count_as_one_answer() -> None:
    players = group([1, 0, 1, 1])
    for place, trajectory in enumerate(players.trajectories):
        trajectory.sample, trajectory.agent = place // 2, ("first", "second")[place % 2]
    figures = summarize([players])
    assert (figures["accuracy"], figures["samples"], figures["pass@1"]) == (0.75, 2, 0.5)


def test_figures_and_samples_are_written(tmp_path: Path) -> None:
    groups = [group([1, None], index=0), group([0, 1], index=1)]
    result = Evaluation({"t": summarize(groups)}, groups)
    path = result.write(tmp_path / "evals" / "step_000003", 3)
    written = json.loads((tmp_path / "evals" / "step_000003.json").read_text())
    assert written["step"] == 3 and written["accuracy"] == 0.5
    assert written["tasks"]["t"] == pytest.approx(result.tasks["t"])
    rows = pq.read_table(path).to_pylist()
    assert path.name == "step_000003.parquet" and len(rows) == 4
    assert [row["error_kind"] for row in rows] == [None, "timeout", None, None]
    assert [row["accuracy"] for row in rows if row["error"] is None] == [1, 0, 1]


def test_one_task_of_several_starts_only_the_models_it_asks() -> None:
    def asks(name: str) -> list[RewardConfig]:
        return [RewardConfig("judge", args={"model": name})]

    made = recipe()
    made.tasks = [TaskConfig(name, SumsSource(), asks(name)) for name in ("a", "b")]
    made.reward_models = [RewardModelConfig(name, ModelConfig("m"), replicas=2) for name in ("a", "b")]
    assert _devices(made, 0) == {}
    assert _devices(made, 3) == {"rollout": [0], "judge.a": [1, 2], "judge.b": [0, 1]}
    loaded = LoadedRecipe("r", made, {})
    _keep_task(loaded, "b")
    assert [model.name for model in made.reward_models] == ["b"] and not list(made.problems())
