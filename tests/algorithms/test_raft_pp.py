"""RAFT++: right answers are imitated, wrong ones take no part."""

import pytest

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.raft_pp import RaftPp
from rollcli.algorithms.shaping import Shaping
from tests.algorithms.batches import batch_of, gradient, trained


def test_right_answers_have_advantage_one_and_wrong_ones_do_not_count() -> None:
    batch = batch_of([".0", ".00", "..000"], [9, -3, 0.1], accuracy=[1, 0.5, 0.6])
    algorithm = RaftPp()
    algorithm.prepare(batch)
    assert algorithm.advantages(batch).tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert algorithm.loss_weights(batch).tolist() == pytest.approx([0, 1 / 2, 0, 0, 0, 0, 0, 1 / 6, 1 / 6, 1 / 6])


def test_a_group_that_is_all_right_is_imitated_and_one_answer_is_enough() -> None:
    batch = batch_of([".0"] * 2, [1, 1])
    algorithm = RaftPp()
    algorithm.prepare(batch)
    assert algorithm.advantages(batch).tolist() == [0, 1, 0, 1] and not algorithm.compares_group()


def test_the_threshold_is_an_option() -> None:
    batch = batch_of(["0", "0"], accuracy=[0.95, 0.9])
    algorithm = RaftPp(threshold=0.9)
    algorithm.prepare(batch)
    assert batch.tokens["loss_mask"].tolist() == [True, False]


def test_the_gain_of_an_imitated_token_is_clipped() -> None:
    tokens = trained([0.0, -1.0], [-1.0, 0.0], advantages=[1.0, 1.0])
    assert gradient(RaftPp(), tokens)[0] == 0.0 and gradient(RaftPp(), tokens)[1] == pytest.approx(-0.36788, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"threshold": 1.0}, ["threshold"]),
        ({"whiten": True}, ["whiten"]),
        ({"shaping": Shaping(clip=[0.0, 1.0])}, ["shaping"]),
        ({"kl": KlPenalty(0.1, "k1", "reward")}, ["kl.place"]),
    ],
)
def test_options_that_would_change_nothing_or_stop_training(options: dict, names: list[str]) -> None:
    assert [name for name, _ in RaftPp(**options).problems()] == names
