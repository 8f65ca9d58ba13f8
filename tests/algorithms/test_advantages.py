"""Group-relative advantages against values worked out by hand, and their properties."""

import numpy as np
import pytest

from rollcli.algorithms.advantages import group_normalized


def test_by_hand() -> None:
    # Mean 0.25, deviations 0.75 and three of -0.25, variance (0.5625 + 3 * 0.0625) / 3 = 0.25, deviation 0.5.
    got = group_normalized(np.array([1.0, 0, 0, 0]), np.zeros(4, dtype=np.int64))
    assert got.tolist() == [1.5, -0.5, -0.5, -0.5]
    centered = group_normalized(np.array([1.0, 0, 0, 0]), np.zeros(4, dtype=np.int64), "none")
    assert centered.tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("value", [0.1, 0.7, 0.3, 0.0, -1e6, 1e-30])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_give_exactly_zero(value: float, dtype: type, scale: str) -> None:
    got = group_normalized(np.full(8, value, dtype=dtype), np.zeros(8, dtype=np.int64), scale)
    assert got.tolist() == [0.0] * 8


def test_rewards_equal_but_for_rounding_give_exactly_zero() -> None:
    assert not group_normalized(np.array([0.1 + 0.2, 0.3, 0.3, 0.3]), np.zeros(4, dtype=np.int64)).any()


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_normalized(np.array([5.0, 1.0, 0.0]), np.array([7, 3, 3]))[0] == 0.0


def test_scale_is_each_groups_own() -> None:
    rewards, groups = np.array([1.0, 0, 10, 0]), np.array([0, 0, 1, 1])
    assert np.abs(group_normalized(rewards, groups)) == pytest.approx([0.5**0.5] * 4)
    assert group_normalized(rewards, groups, "none").tolist() == [0.5, -0.5, 5.0, -5.0]


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
