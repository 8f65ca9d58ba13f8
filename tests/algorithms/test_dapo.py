"""DAPO: GRPO's advantages of penalized scores, clip-higher, token mean, dynamic sampling."""

import math

import numpy as np
import pytest

from rollcli.algorithms.dapo import Dapo
from rollcli.algorithms.masking import Masking
from tests.algorithms.batches import batch_of, gradient, per_answer, trained


def test_an_answer_near_its_budget_loses_before_it_is_compared() -> None:
    # Of 20 tokens a fifth is the buffer: 16 are free, 18 cost 0.5, 20 cost 1.
    got = per_answer(Dapo(), [1, 1, 1, 0], sampled=[10, 18, 20, 16], budget=[20] * 4)
    scores = np.array([1, 0.5, 0, 0])
    assert got == pytest.approx(((scores - 0.375) / scores.std(ddof=1)).tolist())


def test_the_gain_stops_later_above_than_below() -> None:
    tokens = trained([0.0] * 4, [-math.log(ratio) for ratio in (1.27, 1.3, 0.81, 0.79)], advantages=[1, 1, -1, -1])
    loss, metrics = Dapo().loss(tokens)
    assert loss.tolist() == pytest.approx([-1.27, -1.28, 0.81, 0.8])
    assert gradient(Dapo(), tokens) == pytest.approx([-1.27, 0, 0.81, 0])
    assert metrics["clip_share"].tolist() == [0, 1, 0, 1]


def test_every_token_counts_alike_and_a_filtered_answer_not_at_all() -> None:
    batch = batch_of([".0", ".000", ".0000"], [1, 0, 1], truncated=[False, False, True])
    algorithm = Dapo(masking=Masking(truncated=True))
    algorithm.prepare(batch)
    assert algorithm.loss_weights(batch).tolist() == [0, 0.25, 0, 0.25, 0.25, 0.25, 0, 0, 0, 0, 0]


def test_as_in_the_paper() -> None:
    assert Dapo().needs() == frozenset() and Dapo().dynamic_sampling
