"""Advantages against values worked out by hand, slow references, and their properties."""

import numpy as np
import pytest

from rollcli.algorithms.advantages import (
    discounted_returns,
    generalized_advantages,
    group_normalized,
    leave_one_out,
    length_weighted,
    over_mean,
    per_group,
    spread,
    spread_over_tokens,
    whitened,
)
from tests.algorithms.batches import batch_of

ONE = np.zeros(4, dtype=np.int64)


def test_group_normalized_by_hand() -> None:
    # Mean 0.25, deviations 0.75 and three of -0.25, variance (0.5625 + 3 * 0.0625) / 3 = 0.25, deviation 0.5.
    got = group_normalized(np.array([1.0, 0, 0, 0]), ONE)
    assert got.tolist() == [1.5, -0.5, -0.5, -0.5]
    centered = group_normalized(np.array([1.0, 0, 0, 0]), ONE, "none")
    assert centered.tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("value", [0.1, 0.7, 0.3, 0.0, -1e6, 1e-30])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(value: float, dtype: type, scale: str) -> None:
    got = group_normalized(np.full(8, value, dtype=dtype), np.zeros(8, dtype=np.int64), scale)
    assert got.tolist() == [0.0] * 8


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.0])
def test_equal_rewards_give_exactly_zero_by_every_baseline(value: float) -> None:
    rewards, groups = np.full(8, value, dtype=np.float32), np.zeros(8, dtype=np.int64)
    for got in (leave_one_out(rewards, groups), over_mean(rewards, groups),
                length_weighted(rewards, groups, np.arange(1, 9))):  # fmt: skip
        assert got.tolist() == [0.0] * 8


def test_rewards_equal_but_for_rounding_give_exactly_zero() -> None:
    assert not group_normalized(np.array([0.1 + 0.2, 0.3, 0.3, 0.3]), ONE).any()


def test_a_group_of_one_has_no_advantage() -> None:
    rewards, groups = np.array([5.0, 1.0, 0.0]), np.array([7, 3, 3])
    assert group_normalized(rewards, groups)[0] == 0.0
    assert leave_one_out(rewards, groups).tolist() == [0.0, 1.0, -1.0]


def test_scale_is_each_groups_own_or_that_of_all() -> None:
    rewards, groups = np.array([1.0, 0, 10, 0]), np.array([0, 0, 1, 1])
    assert np.abs(group_normalized(rewards, groups)) == pytest.approx([0.5**0.5] * 4)
    assert group_normalized(rewards, groups, "none").tolist() == [0.5, -0.5, 5.0, -5.0]
    # Of all: mean 2.75, squares 1.75² + 2 * 2.75² + 7.25² = 70.75, variance 70.75 / 3.
    whole = (70.75 / 3) ** 0.5
    assert group_normalized(rewards, groups, "batch") == pytest.approx(np.array([0.5, -0.5, 5, -5]) / whole)


def test_groups_are_told_apart_by_id_and_not_by_position() -> None:
    random = np.random.default_rng(0)
    groups = np.repeat([11, -4, 7, 2**40], [8, 3, 5, 2])
    rewards = random.normal(size=len(groups))
    whole = group_normalized(rewards, groups)
    for group in np.unique(groups):
        alone = rewards[groups == group]
        assert whole[groups == group] == pytest.approx((alone - alone.mean()) / alone.std(ddof=1))
        assert whole[groups == group].sum() == pytest.approx(0, abs=1e-12)
    order = random.permutation(len(groups))
    assert group_normalized(rewards[order], groups[order]) == pytest.approx(whole[order], abs=1e-12)


def test_per_group_hands_each_group_its_own_further_columns() -> None:
    got = per_group(np.array([1, 5, 2, 5]), np.array([1, 0, 1, 0]), lambda r, c: r * c, np.array([10, 20, 30, 40]))
    assert got.dtype == np.float64 and got.tolist() == [10, 0, 60, 0]


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1, 1, 1, 1], [0, 0, 0, 0]), ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3])]
)
def test_leave_one_out_by_hand(rewards: list[float], expected: list[float]) -> None:
    assert leave_one_out(np.array(rewards, dtype=float), ONE).tolist() == pytest.approx(expected)


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards, groups = np.random.default_rng(1).normal(size=12), np.tile([5, 1, 9], 4)
    got = leave_one_out(rewards, groups)
    for index in range(12):
        others = [rewards[other] for other in range(12) if other != index and groups[other] == groups[index]]
        assert got[index] == pytest.approx(rewards[index] - sum(others) / len(others))


def test_length_weighted_by_hand() -> None:
    # (1 * 3 + 0 * 1) / 4 = 0.75 is the baseline.
    got = length_weighted(np.array([1.0, 0.0]), np.zeros(2, int), np.array([3, 1]))
    assert got.tolist() == [0.25, -0.75]


def test_length_weighted_where_nothing_was_sampled() -> None:
    groups = np.array([0, 0, 1, 1])
    got = length_weighted(np.array([1.0, 0, 1, 0]), groups, np.array([0, 0, 0, 4]))
    assert got == pytest.approx([0.5, -0.5, 1, 0], abs=1e-6)


def test_over_mean_by_hand() -> None:
    groups = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    got = over_mean(np.array([1.0, 0, 0, 0, 0, 0, -1, 1]), groups)
    assert got.tolist() == [3, -1, -1, -1, 0, 0, 0, 0]


def test_spread_of_equal_or_too_few_values_is_one() -> None:
    assert spread(np.array([3.0, 1.0])) == pytest.approx(2**0.5)
    assert spread(np.full(8, 0.1, dtype=np.float32)) == spread(np.array([4.0])) == spread(np.zeros(0)) == 1.0


def test_whitened_by_hand_and_blind_to_masked_positions() -> None:
    mask = np.array([True, False, True, True, False])
    got = whitened(np.array([1.0, np.nan, 2.0, 3.0, np.inf]), mask)
    assert got.tolist() == [-1.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("values", "mask", "expected"),
    [
        ([5.0, 7.0], [True, False], [5.0, 0.0]),
        ([5.0], [False], [0.0]),
        ([0.1, 0.1, 0.1], [True, True, True], [0.0, 0.0, 0.0]),
        ([], [], []),
    ],
)
def test_whitening_too_few_or_equal_values_is_finite(values, mask, expected) -> None:
    assert whitened(np.array(values), np.array(mask, dtype=bool)).tolist() == expected


def test_whitening_uses_each_positions_own_mask() -> None:
    """A row of two answers is whitened as one set of trained tokens: mean 0, standard deviation 1."""
    random = np.random.default_rng(2)
    values, mask = random.normal(3, 5, size=40), random.random(40) < 0.6
    got = whitened(values, mask)
    assert got[mask].mean() == pytest.approx(0, abs=1e-12) and got[mask].std(ddof=1) == pytest.approx(1)
    assert not got[~mask].any()


def test_every_trained_token_of_several_turns_has_the_trajectorys_value() -> None:
    batch = batch_of([".00..1", "..0.11"])
    got = spread_over_tokens(batch, np.array([2.0, -3.0]))
    assert got.tolist() == [0, 2, 2, 0, 0, 2, 0, 0, -3, 0, -3, -3]


def test_discounted_returns_carry_the_reward_over_what_a_tool_says() -> None:
    batch = batch_of(["00..1"])
    assert discounted_returns(batch, np.array([0, 0, 0, 0, 1.0]), 0.9) == pytest.approx([0.81, 0.9, 0, 0, 1])


def test_generalized_advantages_by_hand() -> None:
    got = generalized_advantages(batch_of(["000"]), np.array([0, 0, 1.0]), np.full(3, 0.5), 1.0, 0.95)
    assert got == pytest.approx([0.45125, 0.475, 0.5])


@pytest.mark.parametrize("value", [9.0, np.nan, np.inf, -1e30])
def test_generalized_advantages_with_any_value_behind_the_answer(value: float) -> None:
    rewards, values = np.array([0, 0, 1.0, value, value]), np.array([0.5, 0.5, 0.5, value, value])
    got = generalized_advantages(batch_of(["000.."]), rewards, values, 1.0, 0.95)
    assert got == pytest.approx([0.45125, 0.475, 0.5, 0, 0])


def test_generalized_advantages_step_over_an_observation() -> None:
    got = generalized_advantages(batch_of(["0..1"]), np.array([0, 0, 0, 1.0]), np.full(4, 0.5), 1.0, 0.95)
    assert got == pytest.approx([0.475, 0, 0, 0.5])


def layouts(random: np.random.Generator) -> list[str]:
    return ["".join(random.choice([".", "0"], size=random.integers(0, 9))) for _ in range(7)]


def slow_advantages(batch, rewards, values, gamma, lam) -> np.ndarray:
    """Equation 16 of the paper as it stands: a sum over all later steps, for each step of each trajectory."""
    result = np.zeros(len(rewards))
    for row in range(len(batch)):
        steps = [t for t in range(batch.offsets[row], batch.offsets[row + 1]) if batch.tokens["loss_mask"][t]]
        following = [*(values[t] for t in steps[1:]), 0.0]
        delta = [rewards[t] + gamma * after - values[t] for t, after in zip(steps, following, strict=False)]
        for place, t in enumerate(steps):
            result[t] = sum((gamma * lam) ** later * delta[place + later] for later in range(len(steps) - place))
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.9, 0.0), (0.0, 0.7), (1.0, 1.0)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_against_a_slow_sum(gamma: float, lam: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    batch = batch_of(layouts(random))
    length = int(batch.offsets[-1])
    rewards, values = random.normal(size=length), random.normal(size=length)
    got = generalized_advantages(batch, rewards, values, gamma, lam)
    assert got == pytest.approx(slow_advantages(batch, rewards, values, gamma, lam), abs=1e-12)
    # Without a critic and with λ 1, what is left is the discounted return.
    returns = discounted_returns(batch, rewards, gamma)
    assert returns == pytest.approx(slow_advantages(batch, rewards, np.zeros(length), gamma, 1.0), abs=1e-12)
    rewards[~batch.tokens["loss_mask"]], values[~batch.tokens["loss_mask"]] = np.nan, np.inf
    assert np.array_equal(generalized_advantages(batch, rewards, values, gamma, lam), got)
    assert np.array_equal(discounted_returns(batch, rewards, gamma), returns)


def test_nothing_at_all() -> None:
    batch = batch_of([])
    nothing = np.zeros(0)
    assert discounted_returns(batch, nothing, 0.9).shape == (0,)
    assert generalized_advantages(batch, nothing, nothing, 0.9, 0.9).shape == (0,)
    assert group_normalized(nothing, np.zeros(0, int)).shape == (0,)
    assert discounted_returns(batch_of(["...", ""]), np.ones(3), 0.9).tolist() == [0, 0, 0]
