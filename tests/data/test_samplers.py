"""Samplers against exact weights, and the store of pass rates against a slow reference."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rollcli.data.samplers import FLOOR, RECENT, UNSEEN, WIDTH, PassRates, shuffled, weighted, weights


def slow_rate(results: list[float]) -> float:
    """The rate of one problem, from all its results: means at first, then the newest weighs `RECENT`."""
    rate = UNSEEN
    for count, result in enumerate(results, start=1):
        share = max(1 / count, RECENT)
        rate = (1 - share) * rate + share * result
    return rate


def test_a_rate_is_the_mean_of_the_first_results_and_then_follows_the_recent_ones() -> None:
    store = PassRates(2)
    for result in (1.0, 0.0, 0.5):
        store.record(1, result)
    assert store.rates.tolist() == [UNSEEN, pytest.approx(0.5)] and store.counts.tolist() == [0, 3]
    store.record(1, 1.0)
    assert store.rates[1] == pytest.approx(0.5 + 0.5 * RECENT)  # 0.3 instead of 1/4


def test_the_store_against_a_slow_reference() -> None:
    random = np.random.default_rng(0)
    store, history = PassRates(20), {row: [] for row in range(20)}
    for _ in range(500):
        row, accuracy = int(random.integers(15)), float(random.random())
        store.record(row, accuracy)
        history[row].append(accuracy)
    for row, results in history.items():
        assert store.rates[row] == pytest.approx(slow_rate(results)) and store.counts[row] == len(results)
    assert (store.rates[15:] == UNSEEN).all()
    assert 0 <= store.rates.min() and store.rates.max() <= 1


def test_an_old_policys_results_are_forgotten() -> None:
    store = PassRates(1)
    for _ in range(50):
        store.record(0, 0.0)
    for _ in range(10):
        store.record(0, 1.0)
    assert store.rates[0] == pytest.approx(1 - (1 - RECENT) ** 10) and store.rates[0] > 0.97


def test_state_makes_the_round_trip_bit_by_bit_and_holds_only_what_was_seen() -> None:
    random = np.random.default_rng(1)
    store = PassRates(1000)
    for _ in range(60):
        store.record(int(random.integers(30)), float(random.random()))
    state = json.loads(json.dumps(store.state()))
    assert set(state) == {"rows", "counts", "rates"} and len(state["rows"]) <= 30 and sum(state["counts"]) == 60
    other = PassRates(1000)
    other.record(999, 1.0)  # is forgotten
    other.restore(state)
    np.testing.assert_array_equal(other.rates, store.rates)
    np.testing.assert_array_equal(other.counts, store.counts)
    other.restore({"rows": [], "counts": [], "rates": []})
    assert (other.rates == UNSEEN).all() and not other.counts.any()


def test_difficulty_weights_are_the_variance_of_the_reward() -> None:
    rates = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
    found = weights("difficulty", rates, 0.7)
    np.testing.assert_allclose(found, [FLOOR, 0.09 + FLOOR, 0.1875 + FLOOR, 0.25 + FLOOR, 0.1875 + FLOOR, FLOOR])
    assert found.argmax() == 3 and found.min() > 0
    np.testing.assert_array_equal(found, weights("difficulty", rates, 0.0))
    # A problem not yet seen is as good as one that is solved half the time.
    assert weights("difficulty", PassRates(1).rates, 0.0)[0] == found[3]


@pytest.mark.parametrize("progress", [0.0, 0.25, 0.5, 1.0])
def test_curriculum_weights_are_a_bell_around_the_wanted_rate(progress: float) -> None:
    rates = np.linspace(0, 1, 21)
    found = weights("curriculum", rates, progress)
    for rate, weight in zip(rates, found):
        assert weight == pytest.approx(math.exp(-((rate - 1 + progress) ** 2) / (2 * WIDTH**2)) + FLOOR)
    assert rates[found.argmax()] == pytest.approx(1 - progress) and found.min() > 0


def test_a_curriculum_moves_from_easy_to_hard() -> None:
    rates = np.linspace(0, 1, 101)
    mean = []
    for progress in np.linspace(0, 1, 11):
        wanted = weights("curriculum", rates, progress)
        mean.append((rates * wanted).sum() / wanted.sum())
    assert mean == sorted(mean, reverse=True) and mean[0] > 0.7 and mean[-1] < 0.3


@pytest.mark.parametrize(("size", "seed"), [(1, 0), (7, 3), (100, 2**62)])
def test_the_uniform_order_is_the_one_that_runs_have_always_had(size: int, seed: int) -> None:
    for index in (*range(3 * size), 10**9):
        epoch, place = divmod(index, size)
        assert shuffled(seed, index, size) == np.random.default_rng([seed, epoch]).permutation(size)[place]


def test_a_weighted_draw_is_where_a_point_of_the_line_falls() -> None:
    wanted = np.array([0.5, 0.0, 2.0, 0.25])
    edges = [0.0, 0.5, 0.5, 2.5, 2.75]
    for index in range(200):
        row = weighted(11, index, wanted.cumsum())
        point = np.random.default_rng([11, index]).random() * 2.75
        assert edges[row] <= point < edges[row + 1]
    assert {weighted(11, index, wanted.cumsum()) for index in range(200)} == {0, 2, 3}


def test_a_draw_depends_on_seed_number_and_record_alone() -> None:
    wanted = weights("difficulty", np.linspace(0, 1, 50), 0.0)
    forward = [weighted(5, index, wanted.cumsum()) for index in range(40)]
    assert forward == [weighted(5, index, wanted.cumsum()) for index in reversed(range(40))][::-1]
    assert forward != [weighted(6, index, wanted.cumsum()) for index in range(40)]
    assert forward != [weighted(5, index, (wanted + np.arange(50)).cumsum()) for index in range(40)]


def test_over_many_draws_each_problem_comes_as_often_as_it_is_wanted() -> None:
    wanted = weights("difficulty", np.array([0.0, 0.2, 0.5, 0.9, 1.0]), 0.0)
    count = 4000
    came = np.bincount([weighted(9, index, wanted.cumsum()) for index in range(count)], minlength=5)
    share = wanted / wanted.sum()
    assert (np.abs(came - count * share) < 5 * np.sqrt(count * share * (1 - share))).all()
