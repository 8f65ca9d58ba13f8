"""GSPO: one ratio for a whole answer, clipped as one."""

import math

import pytest
import torch

from rollcli.algorithms.gspo import Gspo
from tests.algorithms.batches import finite_differences, gradient, per_answer, trained

ROWS = [0, 0, 1, 1, 1, 2]


def test_a_whole_answer_is_clipped_or_not() -> None:
    # Mean log ratios 2e-4 (inside), 5e-4 (outside, good), -5e-4 (outside, good: pushed up all the same).
    old = [-1.0, -1.0004, -1.0, -1.0005, -1.001, -0.9995]
    tokens = trained([-1.0] * 6, old, advantages=[2.0] * 6, rows=ROWS)
    loss, metrics = Gspo().loss(tokens)
    ratios = [math.exp(2e-4)] * 2 + [1 + 4e-4] * 3 + [math.exp(-5e-4)]
    assert loss.tolist() == pytest.approx([-2 * ratio for ratio in ratios], rel=1e-9)
    assert metrics["clip_share"].tolist() == [0, 0, 1, 1, 1, 0]
    assert gradient(Gspo(), tokens) == pytest.approx([-2 * ratios[0]] * 2 + [0] * 3 + [-2 * ratios[5]])


def test_a_bad_answer_is_clipped_below() -> None:
    tokens = trained([-1.0] * 2, [-1.0 + 4e-4, -1.0 - 4e-4], advantages=[-1.0] * 2, rows=[0, 1])
    loss, metrics = Gspo().loss(tokens)
    assert loss.tolist() == pytest.approx([1 - 3e-4, math.exp(4e-4)]) and metrics["clip_share"].tolist() == [1, 0]


def test_the_objective_of_the_paper_against_finite_differences() -> None:
    """Equation 5: the mean over answers of the clipped product of answer ratio and advantage."""
    generator = torch.Generator().manual_seed(0)
    start, old = torch.randn(2, 6, generator=generator, dtype=torch.float64) * 0.3
    rows, lengths = torch.tensor(ROWS), torch.tensor([2.0, 2, 3, 3, 3, 1], dtype=torch.float64)
    values = torch.tensor([1.0, 1, -2, -2, -2, 0.5], dtype=torch.float64)
    algorithm = Gspo(clip_low=0.2, clip_high=0.2)

    def objective(logprobs: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for row in range(3):
            own = rows == row
            ratio, value = (logprobs[own] - old[own]).mean().exp(), values[own][0]
            total = total - torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value) / 3
        return total

    tokens = trained(start, old, advantages=values, rows=ROWS)
    loss = (algorithm.loss(tokens)[0] / lengths / 3).sum()  # seq-mean-token-mean
    (got,) = torch.autograd.grad(loss, tokens.logprobs)
    assert loss.item() == pytest.approx(objective(start).item())
    assert got.tolist() == pytest.approx(finite_differences(objective, start), abs=1e-7)


def test_advantages_are_grpos_and_the_rest_the_papers() -> None:
    assert per_answer(Gspo(), [1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert Gspo().needs() == frozenset() and (Gspo().clip_low, Gspo().clip_high) == (3e-4, 4e-4)
