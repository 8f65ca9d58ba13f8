"""Surrogates: each branch of the clip by hand, gradients by finite differences, and sums over trajectories."""

import math

import numpy as np
import pytest
import torch

from rollcli.algorithms import surrogates
from rollcli.algorithms.surrogates import clipped, dual_clipped
from tests.algorithms.batches import finite_differences


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "active"),
    [
        (1.5, 1.0, -1.2, 0.0, 1.0),  # good and already likelier: no more gain
        (0.5, 1.0, -0.5, -1.0, 0.0),  # good and less likely: pushed up without bound
        (1.5, -1.0, 1.5, 1.0, 0.0),  # bad and likelier: pushed down without bound
        (0.5, -1.0, 0.8, 0.0, 1.0),  # bad and already less likely: no more gain
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.1, 2.0, -2.2, -2.0, 0.0),
    ],
)
def test_quadrants(ratio: float, advantage: float, loss: float, gradient: float, active: float) -> None:
    tensor = torch.tensor([ratio], requires_grad=True)
    value, share = clipped(tensor, torch.tensor([advantage]), 0.2, 0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert tensor.grad.item() == pytest.approx(gradient)
    assert share.tolist() == [active]


def test_bounds_are_offsets_from_one_on_either_side() -> None:
    ratios = torch.tensor([1.5, 1.25, 0.5, 0.95])
    value, _ = clipped(ratios, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.1, 0.28)
    assert value.tolist() == pytest.approx([-1.28, -1.25, 0.9, 0.95])


def test_zero_advantage_is_neither_loss_nor_clipped() -> None:
    value, share = clipped(torch.tensor([5.0, 0.1]), torch.zeros(2), 0.2, 0.2)
    assert value.abs().tolist() == [0.0, 0.0] and share.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "active"),
    [
        (5.0, -2.0, 6.0, 0.0, 1.0),  # bad and far likelier: the loss stops at 3 × 2
        (2.9, -2.0, 5.8, 2.0, 0.0),
        (0.5, -2.0, 1.6, 0.0, 1.0),
        (5.0, 2.0, -2.4, 0.0, 1.0),  # good: the bound has no part in it
        (1.0, -2.0, 2.0, 2.0, 0.0),
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, gradient: float, active: float) -> None:
    tensor = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    value, share = dual_clipped(tensor, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.2, 3.0)
    value.sum().backward()
    assert (value.item(), tensor.grad.item(), share.item()) == pytest.approx((loss, gradient, active))
    plain = dual_clipped(tensor, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.2, None)[0]
    assert torch.equal(plain, clipped(tensor, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.2)[0])


def test_gradients_of_the_clips_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    ratio = (torch.randn(60, generator=generator, dtype=torch.float64) * 0.9).exp().requires_grad_()
    advantages = torch.randn(60, generator=generator, dtype=torch.float64)
    for bound in (None, 2.0):

        def loss(at: torch.Tensor, bound: float | None = bound) -> torch.Tensor:
            return dual_clipped(at, advantages, 0.2, 0.3, bound)[0]

        (got,) = torch.autograd.grad(loss(ratio).sum(), ratio)
        assert got.tolist() == pytest.approx(finite_differences(loss, ratio), abs=1e-6)


def test_ratio_and_its_limit() -> None:
    logprobs = torch.tensor([-1.0, -1.0, 0.0, -500.0], dtype=torch.float64, requires_grad=True)
    ratio = surrogates.ratio(logprobs, torch.tensor([-1.0, -2.0, -500.0, 0.0], dtype=torch.float64))
    assert ratio.tolist() == pytest.approx([1.0, math.e, math.exp(20), math.exp(-20)])
    (slope,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert slope.tolist() == pytest.approx([1.0, math.e, 0.0, 0.0])


ROWS = [2, 0, 0, 2, 2, 5]


def test_sums_and_means_over_trajectories_of_arrays_and_tensors() -> None:
    values, sums = [1.0, 2, 4, 8, 16, 32], [25, 6, 6, 25, 25, 32]
    means = [25 / 3, 3, 3, 25 / 3, 25 / 3, 32]
    for kind, rows in ((torch.tensor, torch.tensor(ROWS)), (np.array, np.array(ROWS))):
        assert surrogates.row_sums(kind(values), rows).tolist() == pytest.approx(sums)
        assert surrogates.row_means(kind(values), rows).tolist() == pytest.approx(means)
    assert surrogates.row_sums(np.zeros(0), np.zeros(0, dtype=np.int64)).shape == (0,)
    assert surrogates.row_means(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_the_gradient_of_a_sum_reaches_every_token_of_the_trajectory() -> None:
    values = torch.zeros(6, requires_grad=True)
    (surrogates.row_sums(values, torch.tensor(ROWS)) * torch.tensor([1.0, 10, 100, 0, 0, 5])).sum().backward()
    assert values.grad.tolist() == [1, 110, 110, 1, 1, 5]


def test_sequence_ratio_is_the_geometric_mean_with_each_tokens_own_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.2, -1.4, -0.5], dtype=torch.float64)
    rows = torch.tensor([0, 0, 1])
    ratio = surrogates.sequence_ratio(logprobs, old, rows)
    assert ratio.tolist() == pytest.approx([math.exp(0.3), math.exp(0.3), 1.0])
    for index, value in enumerate(ratio.tolist()):
        (slope,) = torch.autograd.grad(ratio[index], logprobs, retain_graph=True)
        assert slope.tolist() == pytest.approx([value if place == index else 0.0 for place in range(3)])


def test_the_mean_of_sequence_ratios_has_the_gradient_of_the_true_one() -> None:
    """Per trajectory, the mean over tokens of GSPO-token's ratio moves like exp(mean log ratio) itself."""
    old, rows = torch.tensor([-1.2, -1.4, -0.5, -3.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    logprobs = torch.tensor([-1.0, -1.1, -0.9, -2.5], dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([3.0, 3, 3, 1], dtype=torch.float64)

    def true(at: torch.Tensor) -> torch.Tensor:
        return (at[:3] - old[:3]).mean().exp() + (at[3:] - old[3:]).mean().exp()

    (got,) = torch.autograd.grad((surrogates.sequence_ratio(logprobs, old, rows) / lengths).sum(), logprobs)
    assert got.tolist() == pytest.approx(finite_differences(true, logprobs), abs=1e-7)


def test_weighted_logprob_has_no_gradient_by_its_weight() -> None:
    logprobs = torch.tensor([-2.0, -3.0], requires_grad=True)
    loss = surrogates.weighted_logprob(logprobs, logprobs * -1, torch.tensor([1.0, -2.0]))
    assert loss.tolist() == [4.0, -18.0]
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    assert slope.tolist() == [-2.0, 6.0]


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 3.0), (0.0, 3.0)])
def test_soft_gate_by_hand(advantage: float, tau: float) -> None:
    ratio = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss = surrogates.soft_gate(ratio, torch.full((2,), advantage, dtype=torch.float64), 1.0, 3.0)
    assert loss.tolist() == pytest.approx([-advantage * 4 / tau / (1 + math.exp(-tau * by)) for by in (0, 1)])
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    assert slope[0].item() == pytest.approx(-advantage)
    gate = 1 / (1 + math.exp(-tau))
    assert slope[1].item() == pytest.approx(-advantage * 4 * gate * (1 - gate))
