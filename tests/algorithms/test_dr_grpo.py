"""Dr. GRPO: no standard deviation, and a constant in place of the answer's length."""

import pytest

from rollcli.algorithms.dr_grpo import DrGrpo
from tests.algorithms.batches import batch_of, per_answer


def test_advantages_are_rewards_less_their_mean() -> None:
    assert per_answer(DrGrpo(), [1, 0, 10, 0], [0, 0, 1, 1]) == [0.5, -0.5, 5, -5]


@pytest.mark.parametrize(
    ("options", "constant"), [({}, 8), ({"divisor": 4}, 4), ({"aggregation": "seq-mean-token-sum"}, 1)]
)
def test_tokens_of_long_and_short_answers_weigh_alike(options: dict, constant: int) -> None:
    batch, algorithm = batch_of([".0", "..000"], budget=[8, 8]), DrGrpo(**options)
    algorithm.prepare(batch)
    share = 1 / 2 / constant
    assert algorithm.loss_weights(batch).tolist() == pytest.approx([0, share, 0, 0, share, share, share])


def test_a_constant_of_its_own_needs_an_aggregation_that_has_one() -> None:
    assert list(DrGrpo(divisor=4).problems()) == [] == list(DrGrpo().problems())
    assert [name for name, _ in DrGrpo(divisor=4, aggregation="seq-mean-token-sum").problems()] == ["divisor"]


def test_as_in_the_paper() -> None:
    assert DrGrpo().needs() == frozenset() and DrGrpo().scale == "none"
