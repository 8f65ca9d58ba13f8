"""Lite PPO: the group's mean, the batch's standard deviation, every token alike."""

import pytest

from rollcli.algorithms.lite_ppo import LitePpo
from tests.algorithms.batches import batch_of, per_answer


def test_advantages_in_units_of_the_batch() -> None:
    # All of [1, 0, 10, 0]: deviations from 2.75 squared 1.75² + 2 × 2.75² + 7.25² = 70.75, over 3.
    whole = (70.75 / 3) ** 0.5
    expected = [0.5 / whole, -0.5 / whole, 5 / whole, -5 / whole]
    assert per_answer(LitePpo(), [1, 0, 10, 0], [0, 0, 1, 1]) == pytest.approx(expected)


def test_a_group_of_one_mind_is_zero_beside_others() -> None:
    assert per_answer(LitePpo(), [0.7, 0.7, 1, 0], [0, 0, 1, 1])[:2] == [0, 0]


def test_token_mean_and_no_penalty() -> None:
    batch, algorithm = batch_of([".0", "..000"]), LitePpo()
    algorithm.prepare(batch)
    assert algorithm.loss_weights(batch).tolist() == [0, 0.25, 0, 0, 0.25, 0.25, 0.25]
    assert algorithm.needs() == frozenset()
