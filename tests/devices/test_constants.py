"""Constants: costs add up, and a fit finds the constants that made what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollcli.devices.constants import Constants, Cost, fit, least_squares, slowest
from rollcli.errors import PlanError


def test_costs_add_up():
    cost = Cost({"link": 1.0, "step_s": 2.0}) + Cost({"link": 3.0}) * 2
    assert cost == Cost({"link": 7.0, "step_s": 2.0})
    assert cost.seconds == 9
    assert slowest(Cost({"link": 2.0}), cost, Cost()) is cost


def cost(constants, work):
    return Cost({
        "train_compute": work[0] / constants.train_compute, "decode_bandwidth": work[1] / constants.decode_bandwidth,
        "step_s": work[2] * constants.step_s, "store_gb_s": work[3] / constants.store_gb_s,
    })  # fmt: skip


def test_the_constants_that_made_the_measurements_are_found():
    said, true = Constants(), Constants(train_compute=0.5, decode_bandwidth=0.5, step_s=3.0, store_gb_s=1.0)
    luck, pairs = np.random.default_rng(0), []
    for _ in range(30):
        work = luck.uniform(1, 20, 4)  # seconds at peak, bytes at peak, calls, gigabytes
        pairs.append((cost(said, work), cost(true, work).seconds))
    found = fit(said, pairs, trust=1e-4)
    for name in ("train_compute", "decode_bandwidth", "step_s", "store_gb_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3)
    assert found.network == said.network  # nothing measured says anything about it


def test_one_measurement_moves_what_it_consists_of():
    found = fit(Constants(), [(Cost({"train_compute": 10.0}), 20.0)])
    assert found.train_compute == pytest.approx(0.2, rel=0.01)
    assert replace(found, train_compute=0.4) == Constants()


def test_a_share_of_a_peak_stays_below_it():
    assert fit(Constants(), [(Cost({"train_compute": 10.0}), 0.1)]).train_compute == 1.0


@pytest.mark.parametrize("pairs", [[], [(Cost({"link": 1.0}), 0.0)], [(Cost({"link": 1.0}), float("nan"))]])
def test_measurements_that_cannot_be_fitted_are_refused(pairs):
    with pytest.raises(PlanError):
        fit(Constants(), pairs)


def test_least_squares_is_optimal():
    """By the conditions of Karush, Kuhn and Tucker, which hold nowhere else for a convex problem."""
    luck = np.random.default_rng(0)
    for _ in range(50):
        matrix, target = luck.standard_normal((12, 6)), luck.standard_normal(12)
        x = least_squares(matrix, target)
        gradient = matrix.T @ (matrix @ x - target)
        assert (x >= 0).all() and (gradient >= -1e-8).all()
        assert abs(x @ gradient) < 1e-8
