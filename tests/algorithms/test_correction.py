"""Rollout correction against a slow loop, and what it leaves alone."""

import math

import numpy as np
import pytest
import torch

from rollcli.algorithms.correction import Correction
from tests.algorithms.batches import trained

DIFFERENCE = [0.1, 1.2, -0.9, 0.3, -2.0, 0.7, 0.0]
ROWS = [0, 0, 0, 1, 1, 2, 3]


def tokens():
    return trained(np.full(7, -1.0), DIFFERENCE, rows=ROWS, rollout_logprobs=np.zeros(7))


def slow_weight(index: int, level: str) -> float:
    own = [DIFFERENCE[other] for other in range(7) if ROWS[other] == ROWS[index]]
    log = {"token": DIFFERENCE[index], "sequence": sum(own), "geometric": sum(own) / len(own)}[level]
    return math.exp(log)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("mode", "low", "high"), [("truncate", 0.0, 1.5), ("mask", 0.5, 1.5), ("mask", 0.0, 1.2)])
def test_against_a_slow_loop(level: str, mode: str, low: float, high: float) -> None:
    ratios = [slow_weight(index, level) for index in range(7)]
    outside = [not low <= ratio <= high for ratio in ratios]
    expected = [
        min(ratio, high) if mode == "truncate" else 0.0 if out else ratio for ratio, out in zip(ratios, outside)
    ]
    assert any(outside) and not all(outside)
    correction = Correction(mode, level, low, high)
    weights, metrics = correction.weights(tokens())
    assert weights.tolist() == pytest.approx(expected)
    assert metrics["correction_weight"].tolist() == pytest.approx(expected)
    assert metrics["correction_clipped"].tolist() == [float(out) for out in outside]
    assert correction.outside(np.array(DIFFERENCE), np.array(ROWS)).tolist() == outside


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_bounds_are_measured_whatever_the_mode(level: str) -> None:
    found = [Correction(mode, level, 0.0, 1.5).outside(np.array(DIFFERENCE), np.array(ROWS)).tolist()
             for mode in ("none", "truncate", "mask")]  # fmt: skip
    assert found[0] == found[1] == found[2] and any(found[0])


def test_none_weighs_nothing() -> None:
    assert Correction().weights(tokens()) == (1.0, {})


def test_weights_have_no_gradient() -> None:
    given = trained([-1.0, -2.0], torch.tensor([-1.0, -1.0]), rollout_logprobs=[-1.5, -1.0])
    given.old_logprobs = given.logprobs
    weights, _ = Correction("truncate").weights(given)
    assert not weights.requires_grad and weights.tolist() == pytest.approx([math.exp(0.5), math.exp(-1)])


def test_equal_policies_weigh_one() -> None:
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "mask"):
            assert Correction(mode, level).weights(trained([-1.0, -3.0]))[0].tolist() == [1.0, 1.0]


def test_icepop_keeps_weights_between_its_bounds() -> None:
    given = trained([-1.0] * 4, [math.log(x) for x in (0.4, 0.6, 4.9, 5.1)], rollout_logprobs=[0.0] * 4)
    assert Correction("mask", "token", 0.5, 5.0).weights(given)[0].tolist() == pytest.approx([0, 0.6, 4.9, 0])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_impossible_tokens_give_finite_weights(level: str) -> None:
    given = trained([-1.0] * 2, [0.0, 0.0], rollout_logprobs=[-5000.0, -5000.0])
    assert Correction("truncate", level, high=2.0).weights(given)[0].tolist() == [2.0, 2.0]
    assert Correction("mask", level, high=2.0).weights(given)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"mode": "mask", "low": 0.5, "high": 5.0}, []),
        ({"low": -0.1}, ["low"]),
        ({"high": 0.0}, ["high", "high"]),
        ({"mode": "mask", "low": 2.0, "high": 2.0}, ["high"]),
        ({"mode": "truncate", "low": 0.5}, ["low"]),
        ({"mode": "truncate", "old_logprobs": "rollout"}, ["mode"]),
        ({"mode": "none", "old_logprobs": "rollout"}, []),
    ],
)
def test_options_that_make_no_sense(options: dict, names: list[str]) -> None:
    assert [name for name, _ in Correction(**options).problems()] == names
