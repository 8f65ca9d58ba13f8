"""Supervised fine-tuning: cross-entropy of the demonstrated tokens, every token the same."""

import numpy as np
import pytest
import torch

from rollcli.algorithms.base import TrainedTokens
from rollcli.algorithms.sft import Sft
from rollcli.data.batch import Batch


def test_loss_is_cross_entropy() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    logprobs = logits.log_softmax(-1)[:, 0]
    loss, metrics = Sft().loss(TrainedTokens(logprobs, logprobs, logprobs, torch.ones(1)))
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.40761, abs=1e-5) and metrics == {}
    assert logits.grad[0].tolist() == pytest.approx([0.66524 - 1, 0.24473, 0.09003], abs=1e-5)


def test_prompt_of_two_and_answer_of_one_trains_one_position() -> None:
    batch = Batch.from_sequences([(np.array([5, 6, 7]), np.array([False, False, True]))])
    assert Sft().loss_weights(batch).tolist() == [0.0, 0.0, 1.0]


def test_it_needs_no_other_model_and_no_group() -> None:
    assert Sft().needs() == frozenset() and not Sft.group_relative
