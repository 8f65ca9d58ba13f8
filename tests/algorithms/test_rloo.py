"""RLOO: each answer against the mean of the others, KL taken off its reward once."""

import math

import numpy as np
import pytest

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.rloo import Rloo
from tests.algorithms.batches import advantages, batch_of, gradient, per_answer, trained


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1, 1, 1, 1], [0, 0, 0, 0]), ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3])]
)
def test_by_hand(rewards: list[float], expected: list[float]) -> None:
    assert per_answer(Rloo(), rewards) == pytest.approx(expected)


def test_the_kl_of_an_answers_tokens_is_summed_once() -> None:
    """KL 0.1 + 0.2 off a score of 1, none off the other's 0: 0.7 and 0, so 0.7 and -0.7."""
    batch = batch_of([".00", ".0"], [1, 0], old_logprobs=[0, -1, -1, 0, 0], reference_logprobs=[0, -1.1, -1.2, 0, 0])
    got = advantages(Rloo(kl=KlPenalty(1.0, "k1", "reward")), batch)
    assert got.tolist() == pytest.approx([0, 0.7, 0.7, 0, -0.7])


def test_against_a_slow_reference() -> None:
    random = np.random.default_rng(0)
    layouts, groups = [".000", "..0.1", "0", ".00.11.2", "00"], [0, 1, 0, 1, 1]
    old, reference = random.normal(size=(2, sum(map(len, layouts)))).astype(np.float32)
    batch = batch_of(layouts, random.normal(size=5), groups, old_logprobs=old, reference_logprobs=reference)
    kept = batch.tokens["loss_mask"]
    totals = [
        batch.samples["reward"][row] - 0.03 * (old - reference)[kept & (batch.rows == row)].sum() for row in range(5)
    ]
    got = advantages(Rloo(), batch)
    for row in range(5):
        others = [totals[other] for other in range(5) if other != row and groups[other] == groups[row]]
        expected = totals[row] - sum(others) / len(others)
        assert got[kept & (batch.rows == row)] == pytest.approx(expected, abs=1e-5)


def test_tokens_of_long_and_short_answers_weigh_alike() -> None:
    batch, algorithm = batch_of([".0", "..000"]), Rloo()
    algorithm.prepare(batch)
    assert algorithm.loss_weights(batch).tolist() == [0, 0.5, 0, 0, 0.5, 0.5, 0.5]


def test_the_loss_is_reinforce() -> None:
    tokens = trained([0.0, 0.0], [-1.0, 0.0], advantages=[1.0, -2.0])
    assert gradient(Rloo(kl=KlPenalty()), tokens) == pytest.approx([-math.e, 2])
    assert Rloo().needs() == {"reference", "old"}
