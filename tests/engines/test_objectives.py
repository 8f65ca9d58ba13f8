"""What objectives make of outputs, by hand; that engines bring them the right ones is tested with the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from rollcli.algorithms.base import Algorithm, TrainedTokens, ValueTokens
from rollcli.algorithms.ppo import Ppo
from rollcli.engines import objectives
from rollcli.engines.objectives import Distribution, LogProbs, TokenColumns, Values


def columns(ids: list[int], rows: list[int] | None = None, **values: list) -> TokenColumns:
    tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
    return TokenColumns(tensors.get, torch.tensor(rows or [0] * len(ids)), torch.tensor(ids))


@dataclass
class Seen(Algorithm):
    """Keeps the tokens it was given."""

    def loss(self, tokens: TrainedTokens):
        self.tokens = tokens
        return -tokens.logprobs * tokens.advantages, {"mine": tokens.advantages}

    def value_loss(self, tokens: ValueTokens):
        self.tokens = tokens
        return (tokens.values - tokens.returns) ** 2, {"mine": tokens.old_values}


# --- log-probabilities


@pytest.mark.parametrize(("temperature", "value"), [(1, -0.4076), (0.5, -0.1429), (2, -0.6803)])
def test_temperature_divides_the_logits(temperature: float, value: float) -> None:
    outputs, tokens = torch.tensor([[2.0, 1.0, 0.0]]), columns([0])
    assert LogProbs(temperature).column(tokens, outputs).tolist() == pytest.approx([value], abs=5e-5)
    losses, _, logprobs = LogProbs(temperature, Seen()).loss(tokens, outputs)
    assert logprobs.tolist() == pytest.approx([value], abs=5e-5)
    assert losses.tolist() == pytest.approx([-value], abs=5e-5)


def test_each_token_is_read_from_its_own_row() -> None:
    outputs = torch.tensor([[0.0, math.log(3)], [math.log(9), 0.0], [0.0, 0.0]])
    wanted = [math.log(3 / 4), math.log(1 / 10), math.log(1 / 2)]
    assert LogProbs(1.0).column(columns([1, 1, 0]), outputs).tolist() == pytest.approx(wanted, abs=1e-6)


def test_huge_logits_stay_finite() -> None:
    outputs = torch.tensor([[1e4, -1e4], [1e4, -1e4]], requires_grad=True)
    losses, metrics, logprobs = LogProbs(0.5, Seen()).loss(columns([0, 1]), outputs)
    assert logprobs.tolist() == [0.0, -4e4]
    losses.sum().backward()
    assert outputs.grad.isfinite().all() and metrics["entropy"].tolist() == [0.0, 0.0]


def test_without_columns_the_old_policy_is_this_one() -> None:
    algorithm = Seen()
    outputs = torch.randn(4, 7, requires_grad=True)
    _, metrics, logprobs = LogProbs(0.7, algorithm).loss(columns([1, 2, 3, 4], [5, 5, 6, 6]), outputs)
    tokens = algorithm.tokens
    assert torch.equal(tokens.old_logprobs, logprobs) and torch.equal(tokens.rollout_logprobs, logprobs)
    assert tokens.advantages.tolist() == [1.0] * 4  # as for demonstrations
    assert tokens.reference_logprobs is None and tokens.reference_distribution is None
    assert tokens.rows.tolist() == [5, 5, 6, 6]
    assert tokens.logprobs.requires_grad and not tokens.old_logprobs.requires_grad and not logprobs.requires_grad
    assert torch.allclose(tokens.logits, outputs / 0.7)
    assert metrics["kl_old"].tolist() == [0.0] * 4


def test_columns_reach_the_algorithm_as_they_are() -> None:
    algorithm = Seen()
    given = {"old_logprobs": [-1.0, -2.0], "advantages": [0.5, -0.5], "reference_logprobs": [-3.0, -4.0],
             "reference_distribution": [[-1.0, -2.0], [-3.0, -4.0]]}  # fmt: skip
    LogProbs(1.0, algorithm).loss(columns([0, 1], **given), torch.zeros(2, 2))
    for name, values in given.items():
        assert getattr(algorithm.tokens, name).tolist() == values
    assert algorithm.tokens.rollout_logprobs.tolist() == [-1.0, -2.0]  # no gap is known
    LogProbs(1.0, algorithm).loss(columns([0, 1], rollout_logprobs=[-5.0, -6.0], **given), torch.zeros(2, 2))
    assert algorithm.tokens.rollout_logprobs.tolist() == [-5.0, -6.0]
    assert algorithm.tokens.old_logprobs.tolist() == [-1.0, -2.0]


def test_metrics_by_hand() -> None:
    """Two tokens of probability 1/2 under logits of 0 were 1/4 and 1: k3 of -log 2 and of log 2."""
    outputs = torch.zeros(2, 2)
    old = [math.log(1 / 4), 0.0]
    _, metrics, _ = LogProbs(1.0, Seen()).loss(columns([0, 1], old_logprobs=old, advantages=[3.0, 4.0]), outputs)
    assert metrics["kl_old"].tolist() == pytest.approx([2 - 1 - math.log(2), 0.5 - 1 + math.log(2)])
    assert metrics["entropy"].tolist() == pytest.approx([math.log(2)] * 2)
    assert metrics["mine"].tolist() == [3.0, 4.0]


def test_entropy_is_of_the_sampled_distribution_and_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, tokens = torch.randn(10, 5), columns([0] * 10)
    probabilities = (outputs.double() / 0.5).softmax(-1)
    slow = -(probabilities * probabilities.log()).sum(-1)
    whole = LogProbs(0.5, Seen()).loss(tokens, outputs)[1]["entropy"]
    monkeypatch.setattr(objectives, "ENTROPY_ROWS", 3)
    parts = LogProbs(0.5, Seen()).loss(tokens, outputs)[1]["entropy"]
    assert torch.equal(whole, parts) and whole.tolist() == pytest.approx(slow.tolist(), abs=1e-6)


def test_gradient_is_one_hot_minus_softmax_over_the_temperature() -> None:
    outputs = torch.randn(1, 4, requires_grad=True)
    losses, _, _ = LogProbs(2.0, Seen()).loss(columns([2], advantages=[3.0]), outputs)
    losses.sum().backward()
    wanted = -3.0 * (torch.nn.functional.one_hot(torch.tensor([2]), 4) - (outputs.detach() / 2).softmax(-1)) / 2
    assert torch.allclose(outputs.grad, wanted, atol=1e-6)


# --- distributions


def test_a_distribution_is_one_and_agrees_with_the_log_probabilities() -> None:
    outputs, tokens = torch.randn(6, 5), columns([0, 1, 2, 3, 4, 0])
    table = Distribution(0.7).column(tokens, outputs)
    assert table.shape == (6, 5) and torch.allclose(table.exp().sum(-1), torch.ones(6), atol=1e-6)
    picked = table[torch.arange(6), tokens.ids]
    assert torch.allclose(picked, LogProbs(0.7).column(tokens, outputs), atol=1e-6)


def test_a_distribution_has_no_loss() -> None:
    with pytest.raises(NotImplementedError):
        Distribution(1.0).loss(columns([0]), torch.zeros(1, 2))


# --- values


def test_a_value_is_the_one_output() -> None:
    outputs = torch.tensor([[0.5], [-2.0]])
    assert Values().column(columns([1, 1]), outputs).tolist() == [0.5, -2.0]


def test_columns_reach_the_value_loss() -> None:
    algorithm = Seen()
    outputs = torch.tensor([[0.5], [-2.0]], requires_grad=True)
    losses, metrics, values = Values(algorithm).loss(columns([0, 0], values=[1.0, 2.0], returns=[0.0, 1.0]), outputs)
    assert algorithm.tokens.old_values.tolist() == [1.0, 2.0] and algorithm.tokens.returns.tolist() == [0.0, 1.0]
    assert losses.tolist() == [0.25, 9.0] and metrics["mine"].tolist() == [1.0, 2.0]
    assert values.tolist() == [0.5, -2.0] and not values.requires_grad
    losses.sum().backward()
    assert outputs.grad.tolist() == [[1.0], [-6.0]]


def test_ppos_value_loss_by_hand() -> None:
    """Within the clip: (1 - 0)²/2. Moved 0.7 from 0.3 where 0.2 is seen: the larger of (1 - 0)² and (0.5 - 0)², half.

    Past the clip and away from the return, the bounded error is the larger: (0.2 - 2)² against (1 - 2)², no gradient.
    """
    outputs = torch.tensor([[1.0], [1.0], [1.0]], requires_grad=True)
    given = columns([0, 0, 0], values=[0.9, 0.3, 0.0], returns=[0.0, 0.0, 2.0])
    losses, metrics, _ = Values(Ppo()).loss(given, outputs)
    assert losses.tolist() == pytest.approx([0.5, 0.5, 1.62])
    assert metrics["value_clip_share"].tolist() == [0, 0, 1]
    losses.sum().backward()
    assert outputs.grad.flatten().tolist() == pytest.approx([1.0, 1.0, 0.0])
