"""Identity of tasks, and what counts as usable."""

import math
import pickle

import numpy as np

from rollcli.data.carriers import Group, Task, Trajectory


def test_task_id_is_name_and_index() -> None:
    assert Task("math", 7, []).id == "math/7"
    assert Task("math", 7, [{"role": "user", "content": "a"}]).id == Task("math", 7, []).id


def test_a_test_problem_is_another_than_the_training_problem_of_its_index() -> None:
    assert Task("math", 7, [], split="test").id == "math/test/7"


def test_the_greedy_answer_is_a_groups_baseline_and_none_of_its_answers() -> None:
    task = Task("math", 7, [])
    greedy = Trajectory.failed(task, 1, "engine", "lost")
    greedy.reward = 0.75
    assert Group(task, [], [greedy]).greedy_reward() == 0.75 and Group(task, [], [greedy]).usable == []
    assert math.isnan(Group(task, []).greedy_reward())


def test_a_failed_episode_is_counted_and_not_used() -> None:
    task = Task("math", 7, [])
    failed = Trajectory.failed(task, 3, "environment", "ValueError: no")
    assert (failed.task_id, failed.sample, failed.stop_reason) == ("math/7", 3, "error")
    assert (failed.error, failed.error_kind) == ("ValueError: no", "environment")
    assert not failed.usable and failed.response_tokens == 0 and len(failed.tokens) == 0
    good = Trajectory(task.id, 0, np.arange(3), np.array([0, 1, 1], bool), np.zeros(3), np.zeros(3))
    assert good.usable and good.response_tokens == 2
    group = Group(task, [good, failed])
    assert group.id == "math/7" and group.usable == [good]
    assert pickle.loads(pickle.dumps(group)).id == group.id
