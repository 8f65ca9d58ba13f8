"""SAPO: GRPO's advantages behind a gate that fades with the ratio's distance from 1."""

import math

import pytest
import torch

from rollcli.algorithms.sapo import Sapo
from tests.algorithms.batches import finite_differences, gradient, per_answer, trained


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("ratio", [0.2, 1.0, 1.5, 4.0])
@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_loss_and_gradient_by_hand(ratio: float, advantage: float, tau: float) -> None:
    tokens = trained([-1.0], [-1.0 - math.log(ratio)], advantages=[advantage])
    gate = sigmoid(tau * (ratio - 1))
    assert Sapo().loss(tokens)[0].item() == pytest.approx(-4 / tau * gate * advantage)
    # The paper's equation 6: the weight is 4 p (1 - p), times the ratio.
    assert gradient(Sapo(), tokens) == pytest.approx([-4 * gate * (1 - gate) * ratio * advantage])


def test_gradient_against_finite_differences() -> None:
    start, old, values = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    algorithm = Sapo(tau_positive=0.7, tau_negative=2.0)
    expected = finite_differences(lambda at: algorithm.loss(trained(at, old, advantages=values))[0].detach(), start)
    assert gradient(algorithm, trained(start, old, advantages=values)) == pytest.approx(expected, abs=1e-6)


def test_a_bad_tokens_gradient_fades_faster() -> None:
    tokens = trained([0.0, 0.0], [-1.0, -1.0], advantages=[1.0, -1.0])
    good, bad = gradient(Sapo(), tokens)
    assert 0 < bad < -good


def test_advantages_are_grpos_and_the_rest_the_papers() -> None:
    assert per_answer(Sapo(), [1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert (Sapo().tau_positive, Sapo().tau_negative, Sapo().aggregation) == (1.0, 1.05, "seq-mean-token-mean")
    assert Sapo().needs() == frozenset()


@pytest.mark.parametrize("name", ["tau_positive", "tau_negative"])
def test_options_that_make_no_sense(name: str) -> None:
    assert [found for found, _ in Sapo(**{name: 0}).problems()] == [name] and list(Sapo().problems()) == []
