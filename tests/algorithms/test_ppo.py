"""PPO: generalized advantages with KL in the reward, whitening, and the critic's targets and loss."""

import numpy as np
import pytest
import torch

from rollcli.algorithms.base import ValueTokens
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.ppo import Ppo
from tests.algorithms.batches import advantages, batch_of, finite_differences

PLAIN = {"kl": KlPenalty(), "whiten": False}


def test_advantages_by_hand() -> None:
    batch = batch_of(["..000"], [1.0], values=[9, np.nan, 0.5, 0.5, 0.5])
    assert advantages(Ppo(**PLAIN), batch).tolist() == pytest.approx([0, 0, 0.45125, 0.475, 0.5])


def returns(algorithm: Ppo, batch) -> list[float]:
    algorithm.prepare(batch)
    got = algorithm.returns(batch)
    assert got.dtype == np.float32
    return got.tolist()


def test_returns_are_advantages_plus_values_and_never_whitened() -> None:
    values = [9, np.nan, 0.5, 0.5, 0.5]
    for whiten in (False, True):
        got = returns(Ppo(kl=KlPenalty(), whiten=whiten), batch_of(["..000"], [1.0], values=values))
        assert got == pytest.approx([0, 0, 0.95125, 0.975, 1.0])
    for lam in (0.0, 1.0):
        expected = 1.0 if lam else 0.5
        got = returns(Ppo(**PLAIN, lam=lam), batch_of(["..000"], [1.0], values=values))
        assert got == pytest.approx([0, 0, expected, expected, 1.0])


def test_kl_comes_off_each_tokens_reward() -> None:
    # Differences 1 and -0.5, coefficient 0.1; λ and γ are 1 and values 0: what is left is the return.
    batch = batch_of([".00"], [1.0], old_logprobs=[5, -1, -1], reference_logprobs=[0, -2, -0.5])
    algorithm = Ppo(kl=KlPenalty(0.1, "k1", "reward"), whiten=False, lam=1.0)
    assert advantages(algorithm, batch).tolist() == pytest.approx([0, 1 + 0.05 - 0.1, 1 + 0.05])


def test_turn_rewards_stand_where_they_were_earned() -> None:
    batch = batch_of(["0.1"], [3.0], turn_rewards=[1.0, 0, 0])
    assert advantages(Ppo(**PLAIN, lam=1.0, gamma=0.5), batch).tolist() == [2.0, 0, 2.0]


def test_whitened_over_the_batch() -> None:
    batch = batch_of([".0", ".0", ".0", ".0"], [0, 0, 0, 4])
    assert advantages(Ppo(kl=KlPenalty()), batch)[1::2].tolist() == [-0.5, -0.5, -0.5, 1.5]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_value_loss_by_hand() -> None:
    # Inside the clip; moved beyond it towards the return: bounded at 0.2; moved beyond it away: the larger, plain one.
    values = tensor(1.1, 1.5, 0.5).requires_grad_()
    loss, metrics = Ppo().value_loss(ValueTokens(values, tensor(1, 1, 1), tensor(2, 2, 2)))
    assert loss.tolist() == pytest.approx([0.81 / 2, 0.64 / 2, 2.25 / 2])
    (slope,) = torch.autograd.grad(loss.sum(), values)
    assert slope.tolist() == pytest.approx([-0.9, 0.0, -1.5])
    assert metrics["value_clip_share"].tolist() == [0, 1, 0]
    assert metrics["value_mean"].tolist() == [1.1, 1.5, 0.5] and metrics["return_mean"].tolist() == [2, 2, 2]
    assert not metrics["value_mean"].requires_grad


def test_value_loss_without_a_clip() -> None:
    loss, metrics = Ppo(value_clip=None).value_loss(ValueTokens(tensor(1.5, 0.5), tensor(1, 1), tensor(2, 2)))
    assert loss.tolist() == [0.125, 1.125] and "value_clip_share" not in metrics


def test_gradient_of_the_value_loss_against_finite_differences() -> None:
    start, old, targets = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (old + start * 0.4).requires_grad_()
    (got,) = torch.autograd.grad(Ppo().value_loss(ValueTokens(values, old, targets))[0].sum(), values)
    expected = finite_differences(lambda at: Ppo().value_loss(ValueTokens(at, old, targets))[0], values)
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_what_is_needed() -> None:
    assert Ppo().needs() == {"critic", "reference", "old"} and Ppo(kl=KlPenalty()).needs() == {"critic"}
    assert not Ppo().compares_group()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"gamma": 1.5}, ["gamma"]),
        ({"lam": -0.1}, ["lam"]),
        ({"value_clip": 0}, ["value_clip"]),
        ({"value_clip": None, "gamma": 0.0, "lam": 1.0}, []),
        ({"clip_low": 0}, ["clip_low"]),
    ],
)
def test_options_that_make_no_sense(options: dict, names: list[str]) -> None:
    assert [name for name, _ in Ppo(**options).problems()] == names
