"""Kimi k1.5: REINFORCE against the group's mean, and the square of a whole answer's log ratio."""

import pytest
import torch

from rollcli.algorithms.kimi_k15 import KimiK15
from rollcli.algorithms.shaping import Shaping
from tests.algorithms.batches import finite_differences, gradient, per_answer, trained


def test_by_hand() -> None:
    # Log ratios of the answers: 0.3 + 0.1 = 0.4 and -0.5; the square adds τ × log ratio to each token's slope.
    tokens = trained([-1.0, -2.0, -3.0], [-1.3, -2.1, -2.5], advantages=[1.0, 1.0, -2.0], rows=[0, 0, 1])
    loss, metrics = KimiK15(tau=0.2).loss(tokens)
    assert loss.tolist() == pytest.approx([1 + 0.1 * 0.08, 2 + 0.1 * 0.08, -6 + 0.1 * 0.25])
    assert gradient(KimiK15(tau=0.2), tokens) == pytest.approx([-1 + 0.2 * 0.4] * 2 + [2 - 0.2 * 0.5])
    assert metrics["mirror_square"].tolist() == pytest.approx([0.08, 0.08, 0.25])


def test_the_summed_loss_is_the_papers_against_finite_differences() -> None:
    old = torch.tensor([-1.3, -2.1, -2.5, -0.4], dtype=torch.float64)
    start = torch.tensor([-1.0, -2.4, -3.0, -0.1], dtype=torch.float64)

    def objective(logprobs: torch.Tensor) -> torch.Tensor:
        answers = [(slice(0, 3), 0.7), (slice(3, 4), -0.7)]
        return sum(
            -value * logprobs[own].sum() + 0.05 * (logprobs[own] - old[own]).sum() ** 2 for own, value in answers
        )

    tokens = trained(start, old, advantages=[0.7, 0.7, 0.7, -0.7], rows=[0, 0, 0, 1])
    assert KimiK15().loss(tokens)[0].sum().item() == pytest.approx(objective(start).item())
    assert gradient(KimiK15(), tokens) == pytest.approx(finite_differences(objective, start), abs=1e-7)


def test_without_the_square_it_is_reinforce() -> None:
    tokens = trained([-1.0, -2.0], [-1.5, -1.0], advantages=[1.0, -2.0])
    assert gradient(KimiK15(tau=0), tokens) == [-1.0, 2.0]


def test_advantages_are_rewards_less_their_mean() -> None:
    assert per_answer(KimiK15(), [1, 0, 0, 0, 6, 2], [0] * 4 + [1] * 2) == [0.75, -0.25, -0.25, -0.25, 2, -2]


def test_shorter_answers_gain_by_the_papers_length_reward() -> None:
    # 0.5, 0 (wrong), -0.5 on top of 1, 0, 1: scores 1.5, 0, 0.5, of mean 2/3.
    got = per_answer(KimiK15(shaping=Shaping(length_reward=1.0)), [1, 0, 1], sampled=[1, 1, 3])
    assert got == pytest.approx([1.5 - 2 / 3, -2 / 3, 0.5 - 2 / 3])


def test_options_that_make_no_sense() -> None:
    assert [name for name, _ in KimiK15(tau=-1).problems()] == ["tau"] and list(KimiK15(tau=0).problems()) == []
