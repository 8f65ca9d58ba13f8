"""TOPR: good answers are imitated at full weight, bad ones by the whole answer's ratio, at most 1."""

import math

import pytest

from rollcli.algorithms.topr import Topr
from tests.algorithms.batches import gradient, per_answer, trained


def test_by_hand() -> None:
    # Answers of log ratio -0.7, -0.7, +0.5: a good one and two bad ones.
    old = [-0.7, -1.6, -0.7, -1.6, -2.5]
    tokens = trained([-1.0, -2.0, -1.0, -2.0, -2.0], old, advantages=[2, 2, -2, -2, -3], rows=[0, 0, 1, 1, 2])
    taper = math.exp(-0.7)
    loss, metrics = Topr().loss(tokens)
    assert metrics["taper"].tolist() == pytest.approx([1, 1, taper, taper, 1])
    assert loss.tolist() == pytest.approx([2, 4, -2 * taper, -4 * taper, -6])
    assert gradient(Topr(), tokens) == pytest.approx([-2, -2, 2 * taper, 2 * taper, 3])


def test_a_bad_answer_that_is_no_longer_given_is_left_alone() -> None:
    tokens = trained([-9.0] * 3, [-1.0] * 3, advantages=[-1.0] * 3)
    assert gradient(Topr(), tokens) == pytest.approx([math.exp(-24)] * 3)
    good = trained([-9.0] * 3, [-1.0] * 3, advantages=[1.0] * 3)
    assert gradient(Topr(), good) == [-1.0] * 3


@pytest.mark.parametrize(("options", "expected"), [({}, [0.5, -0.5, 0.0]), ({"baseline": 0}, [1, 0, 0.5])])
def test_advantages_are_scores_above_the_baseline(options: dict, expected: list[float]) -> None:
    assert per_answer(Topr(**options), [1, 0, 0.5]) == expected


def test_one_answer_is_enough_and_no_reference() -> None:
    assert not Topr().compares_group() and Topr().needs() == frozenset()


def test_the_taper_is_against_the_policy_that_sampled() -> None:
    assert Topr().old_from_rollout
    assert [name for name, _ in Topr(baseline=float("inf")).problems()] == ["baseline"]
