"""Reward shaping: each part by hand, the running statistics against NumPy, and the order of the parts."""

import numpy as np
import pytest

from rollcli.algorithms.shaping import RunningMoments, Shaping, length_reward, overlong_penalty
from tests.algorithms.batches import batch_of


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (15, 0), (16, -0.2), (18, -0.6), (20, -1), (25, -1)])
def test_overlong_penalty_of_a_buffer_of_5_before_20(length: int, penalty: float) -> None:
    assert overlong_penalty(np.array([float(length)]), np.array([20.0]), 5.0).tolist() == pytest.approx([penalty])


@pytest.mark.parametrize("buffer", [5, 0.25])
def test_an_answer_loses_what_its_length_costs(buffer: float) -> None:
    batch = batch_of(["0"] * 4, [1, 1, 0, 0], sampled=[15, 16, 18, 20], budget=[20] * 4)
    assert Shaping(overlong_buffer=buffer)(batch).tolist() == pytest.approx([1, 0.8, -0.6, -1])
    assert Shaping(overlong_buffer=buffer, overlong_penalty=0.5)(batch).tolist() == pytest.approx([1, 0.9, -0.3, -0.5])
    assert batch.samples["reward"].tolist() == [1, 1, 0, 0] and batch.samples["accuracy"].tolist() == [1, 1, 0, 0]


def test_a_share_of_the_budget_is_each_answers_own() -> None:
    batch = batch_of(["0"] * 2, [0, 0], sampled=[18, 36], budget=[20, 40])
    assert Shaping(overlong_buffer=0.2)(batch).tolist() == pytest.approx([-0.5, -0.5])
    assert Shaping(overlong_buffer=4)(batch).tolist() == pytest.approx([-0.5, 0])


def test_length_reward_by_hand() -> None:
    # Shortest 10, longest 30: 0.5, 0, -0.5; a wrong answer keeps only what is below 0. The second group is of one mind.
    lengths, groups = np.array([10.0, 20, 30, 10, 30, 7, 7]), np.array([0, 0, 0, 0, 0, 1, 1])
    right = np.array([True, True, True, False, False, True, False])
    assert length_reward(lengths, groups, right).tolist() == [0.5, 0, -0.5, 0, -0.5, 0, 0]


def test_a_length_reward_is_weighted_and_judged_by_accuracy() -> None:
    batch = batch_of(["0"] * 3, [0.0, 5, 2], sampled=[10, 20, 30], accuracy=[1, 0, 1])
    assert Shaping(length_reward=0.2)(batch).tolist() == pytest.approx([0.1, 5, 1.9])


def test_clip() -> None:
    batch = batch_of(["0"] * 4, [-30, -1, 4, 50])
    assert Shaping(clip=[-10, 10])(batch).tolist() == [-10, -1, 4, 10]


def test_the_order_is_penalty_clip_normalization() -> None:
    batch = batch_of(["0"] * 2, [5, 5], sampled=[20, 10], budget=[20, 20])
    # 5 - 4 = 1 and 5; clipped to 1 and 3; mean 2.
    assert Shaping(overlong_buffer=5, overlong_penalty=4, clip=[0, 3], mean="batch")(batch).tolist() == [-1, 1]


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("none", "none", [1, 3, 10, 30]),
        ("batch", "none", [-10, -8, -1, 19]),
        ("group", "none", [-1, 1, -10, 10]),
        ("group", "group", [-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5]),
        ("none", "group", [1 / 2**0.5, 3 / 2**0.5, 10 / 200**0.5, 30 / 200**0.5]),
        # Squares of deviations 100 + 64 + 1 + 361 = 526 over 3.
        ("batch", "batch", [value / (526 / 3) ** 0.5 for value in (-10, -8, -1, 19)]),
        ("group", "batch", [value / (526 / 3) ** 0.5 for value in (-1, 1, -10, 10)]),
    ],
)
def test_mean_and_standard_deviation(mean: str, std: str, expected: list[float]) -> None:
    batch = batch_of(["0"] * 4, [1, 3, 10, 30], [4, 4, 2, 2])
    assert Shaping(mean=mean, std=std)(batch).tolist() == pytest.approx(expected)
    order = np.array([3, 0, 2, 1])
    assert Shaping(mean=mean, std=std)(batch.select(order)).tolist() == pytest.approx(list(np.array(expected)[order]))


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("mean", ["batch", "group", "running"])
@pytest.mark.parametrize("std", ["none", "batch", "group", "running"])
def test_equal_rewards_have_no_deviation_from_their_mean(value: float, mean: str, std: str) -> None:
    assert Shaping(mean=mean, std=std)(batch_of(["0"] * 8, [value] * 8, [0] * 4 + [1] * 4)).tolist() == [0.0] * 8


def test_an_empty_step() -> None:
    for over in ("none", "batch", "group", "running"):
        shaping = Shaping(mean=over, std=over, overlong_buffer=0.2, length_reward=1.0, clip=[-1, 1])
        assert shaping(batch_of([])).shape == (0,) and shaping.state()["count"] == 0


def test_running_moments_equal_numpy_over_everything_seen() -> None:
    random = np.random.default_rng(0)
    moments, seen = RunningMoments(), np.zeros(0)
    assert moments.std == 1.0
    for size in (1, 0, 7, 32, 1, 5):
        values = random.normal(1e3, 2.5, size=size)
        moments.add(values)
        seen = np.concatenate([seen, values])
        assert (moments.count, moments.mean) == (len(seen), pytest.approx(seen.mean()))
        assert moments.std == pytest.approx(seen.std(ddof=1) if len(seen) > 1 else 1.0)


def test_running_normalization_by_everything_seen() -> None:
    shaping, random, seen = Shaping(mean="running", std="running"), np.random.default_rng(1), np.zeros(0)
    for _ in range(4):
        rewards = random.normal(3, 2, size=6)
        seen = np.concatenate([seen, rewards])
        got = shaping(batch_of(["0"] * 6, rewards))
        assert got == pytest.approx((rewards - seen.mean()) / seen.std(ddof=1))


def test_running_statistics_go_on_after_a_restore() -> None:
    first, second = Shaping(mean="running", std="running"), Shaping(mean="running", std="running")
    first(batch_of(["0"] * 3, [1, 5, 2]))
    state = first.state()
    assert set(map(type, state.values())) <= {int, float}, "plain numbers"
    second.restore(state)
    later = batch_of(["0"] * 2, [4, -1])
    assert first(later).tolist() == second(later).tolist()
    assert first.state() == second.state() != state, "a state is a copy"
    assert first == Shaping(mean="running", std="running"), "what a run learns is not an option"


def test_statistics_move_only_where_they_are_used() -> None:
    shaping = Shaping(mean="batch")
    shaping(batch_of(["0"] * 3, [1, 5, 2]))
    assert shaping.state()["count"] == 0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"overlong_buffer": 0}, ["overlong_buffer"]),
        ({"overlong_penalty": -1}, ["overlong_penalty"]),
        ({"length_reward": -1}, ["length_reward"]),
        ({"clip": [1.0]}, ["clip"]),
        ({"clip": [2.0, 1.0]}, ["clip"]),
        ({"clip": [-1.0, 1.0], "overlong_buffer": 0.2}, []),
    ],
)
def test_options_that_make_no_sense(options: dict, names: list[str]) -> None:
    assert [name for name, _ in Shaping(**options).problems()] == names
