"""CISPO: GRPO's advantages, and a bounded weight that takes no token's gradient away."""

import math

import pytest

from rollcli.algorithms.cispo import Cispo
from tests.algorithms.batches import gradient, per_answer, trained


@pytest.mark.parametrize(
    ("ratio", "bounds", "weight"),
    [
        (6.0, {}, 5.0),
        (0.01, {}, 0.01),
        (1.0, {}, 1.0),
        (4.9, {}, 4.9),
        (0.01, {"weight_min": 0.5}, 0.5),
        (1.5, {"weight_max": 1.2}, 1.2),
    ],
)
def test_bounds_are_weights_and_not_distances_from_one(ratio: float, bounds: dict, weight: float) -> None:
    tokens = trained([-1.0, -1.0], [-1.0 - math.log(ratio)] * 2, advantages=[2.0, -3.0])
    algorithm = Cispo(**bounds)
    loss, metrics = algorithm.loss(tokens)
    assert loss.tolist() == pytest.approx([2 * weight, -3 * weight])  # -w A log π, log π = -1
    assert gradient(algorithm, tokens) == pytest.approx([-2 * weight, 3 * weight])
    assert metrics["clip_share"].tolist() == [float(weight != ratio)] * 2


def test_advantages_are_grpos() -> None:
    assert per_answer(Cispo(), [1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_as_in_the_paper() -> None:
    assert Cispo().needs() == frozenset() and Cispo().aggregation == "token-mean"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"weight_min": -1}, ["weight_min"]),
        ({"weight_max": 0}, ["weight_max"]),
        ({"weight_min": 2.0, "weight_max": 1.0}, ["weight_max"]),
        ({"entropy_coefficient": -1}, ["entropy_coefficient"]),
    ],
)
def test_options_that_make_no_sense(options: dict, names: list[str]) -> None:
    assert [name for name, _ in Cispo(**options).problems()] == names
