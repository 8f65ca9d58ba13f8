"""MaxRL: advantages in units of the success rate, so that its logarithm grows."""

import pytest
import torch

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.max_rl import MaxRl
from rollcli.algorithms.shaping import Shaping
from tests.algorithms.batches import gradient, per_answer, trained


def test_by_hand() -> None:
    got = per_answer(MaxRl(), [1, 0, 0, 0, 1, 1, 1, 0, 0, 0], [0] * 4 + [1] * 4 + [2] * 2)
    assert got == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0])


def test_nothing_right_and_everything_right_teach_nothing() -> None:
    assert per_answer(MaxRl(), [0, 0, 1, 1], [0, 0, 1, 1]) == [0, 0, 0, 0]


def test_the_gradient_is_that_of_the_logarithm_of_the_success_rate() -> None:
    """Four answers as often as the policy gives them: half right. d log p = Σ π A ∇log π for every logit."""
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    values = torch.tensor(per_answer(MaxRl(), [1, 0, 1, 0]), dtype=torch.float64)
    tokens = trained([0.0] * 4, logprobs.detach(), advantages=values)
    tokens.logprobs = logprobs
    (got,) = torch.autograd.grad(MaxRl().loss(tokens)[0].mean(), logits, retain_graph=True)
    (true,) = torch.autograd.grad(-(logprobs.exp()[[0, 2]].sum()).log(), logits)
    assert got.tolist() == pytest.approx(true.tolist())


def test_clipped_as_ppo() -> None:
    tokens = trained([0.0], [-1.0], advantages=[1.0])
    assert MaxRl().loss(tokens)[0].tolist() == pytest.approx([-1.2]) and gradient(MaxRl(), tokens) == [0.0]


def test_what_makes_other_rewards_than_0_and_1_is_refused() -> None:
    assert [name for name, _ in MaxRl(shaping=Shaping(mean="batch")).problems()] == ["shaping"]
    assert [name for name, _ in MaxRl(kl=KlPenalty(0.1, "k1", "reward")).problems()] == ["kl.place"]
    assert not list(MaxRl().problems())
