"""ReMax: the greedy answer's reward is the baseline."""

import math

import pytest

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.remax import ReMax
from rollcli.algorithms.shaping import Shaping
from tests.algorithms.batches import advantages, batch_of, gradient, trained


def test_advantages_are_rewards_less_the_greedy_answers() -> None:
    batch = batch_of([".0", ".00", "0"], [1, 0, 5], [0, 0, 1], greedy_reward=[0.25, 0.25, 7])
    assert advantages(ReMax(), batch).tolist() == [0, 0.75, 0, -0.25, -0.25, -2]


def test_kl_comes_off_the_answers_reward_as_a_sum() -> None:
    batch = batch_of([".00"], [1.0], old_logprobs=[0, -1, -1], reference_logprobs=[0, -1.5, -2], greedy_reward=[0.5])
    assert advantages(ReMax(kl=KlPenalty(0.1, "k1", "reward")), batch).tolist() == pytest.approx([0, 0.35, 0.35])


def test_it_asks_for_a_greedy_answer_and_for_one_answer_at_least() -> None:
    assert ReMax.greedy_baseline and not ReMax().compares_group()
    assert ReMax().needs() == {"reference", "old"}


def test_the_loss_is_reinforce() -> None:
    tokens = trained([0.0, 0.0], [-1.0, 0.0], advantages=[1.0, -2.0])
    assert gradient(ReMax(kl=KlPenalty()), tokens) == pytest.approx([-math.e, 2])


def test_shaping_is_refused_for_it_would_not_move_the_greedy_answer() -> None:
    assert [name for name, _ in ReMax(shaping=Shaping(clip=[-1.0, 1.0])).problems()] == ["shaping"]
    assert not list(ReMax().problems())
