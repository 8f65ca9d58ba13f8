"""Entropy of next-token distributions."""

import math

import pytest
import torch

from rollcli.algorithms.entropy import entropy
from tests.algorithms.batches import finite_differences


def test_a_uniform_distribution_has_the_logarithm_of_its_size() -> None:
    assert entropy(torch.full((2, 8), 3.0)).tolist() == pytest.approx([math.log(8)] * 2)


def test_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log() + 7
    assert entropy(logits).tolist() == pytest.approx([1.5 * math.log(2)])


def test_a_certain_token_has_none() -> None:
    assert entropy(torch.tensor([[1e4, 0.0, -1e4]])).tolist() == [0.0]


def test_gradient() -> None:
    logits = torch.tensor([[0.3, -1.2, 2.0], [0.0, 0.1, 0.2]], dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(entropy(logits).sum(), logits)
    assert got.flatten().tolist() == pytest.approx(finite_differences(entropy, logits), abs=1e-7)


def test_a_word_that_cannot_be_said_has_no_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    value = entropy(logits)
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(2)) and torch.isfinite(logits.grad).all()
