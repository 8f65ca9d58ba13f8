"""GRPO: loss and gradient by hand, what it needs, which groups it keeps."""

import math

import numpy as np
import pytest
import torch

from rollcli.algorithms.base import TrainedTokens
from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Task, Trajectory
from tests.algorithms.batches import advantages, per_answer


def group(accuracies: list[float], rewards: list[float] | None = None, name: str = "t") -> Group:
    task = Task(name, 0, [])
    rewards = accuracies if rewards is None else rewards
    members = []
    for sample, (accuracy, reward) in enumerate(zip(accuracies, rewards, strict=True)):
        tokens = np.arange(3 + sample, dtype=np.int32)
        members.append(Trajectory(
            task.id, sample, tokens, tokens >= 2, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32),
            reward=reward, accuracy=accuracy,
        ))  # fmt: skip
    return Group(task, members)


def test_loss_and_gradient_by_hand() -> None:
    # Ratios e^0.1 (inside the clip), e^0.5 (outside, good), e^0.5 (outside, bad); reference 1 below, 0, 0.
    logprobs = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.5, -1.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, 1.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-2.0, -1.0, -1.0], dtype=torch.float64)
    loss, metrics = Grpo(kl=KlPenalty(0.1)).loss(TrainedTokens(logprobs, old, old, advantages, reference))
    loss.sum().backward()
    k3 = math.exp(-1) - 1 + 1
    assert loss.tolist() == pytest.approx([-2 * math.exp(0.1) + 0.1 * k3, -1.2, math.exp(0.5)])
    assert logprobs.grad.tolist() == pytest.approx([-2 * math.exp(0.1) + 0.1 * (1 - math.exp(-1)), 0.0, math.exp(0.5)])
    assert metrics["clip_share"].tolist() == [0.0, 1.0, 0.0]
    assert metrics["kl_penalty"].tolist() == pytest.approx([k3, 0, 0])
    assert not metrics["kl_penalty"].requires_grad and not metrics["clip_share"].requires_grad


def test_first_update_has_ratio_one_and_the_policy_gradient() -> None:
    logprobs = torch.tensor([-0.3, -7.1, -1e-4], requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    loss, metrics = Grpo(kl=KlPenalty()).loss(TrainedTokens(logprobs, logprobs.detach(), logprobs, advantages))
    loss.sum().backward()
    assert loss.tolist() == (-advantages).tolist()
    assert logprobs.grad.tolist() == (-advantages).tolist()
    assert metrics["clip_share"].tolist() == [0, 0, 0] and "kl_penalty" not in metrics


def test_loss_rises_with_kl_when_the_policy_has_left_the_reference() -> None:
    for reference in (-2.0, -0.5):
        values = []
        for beta in (0.0, 0.1, 0.2):
            lp = torch.tensor([-1.0])
            tokens = TrainedTokens(lp, lp, lp, torch.zeros(1), torch.tensor([reference]))
            values.append(Grpo(kl=KlPenalty(beta)).loss(tokens)[0].item())
        assert values[0] < values[1] < values[2]


def test_reference_is_needed_only_when_paid_for() -> None:
    assert Grpo().needs() == {"reference"} and Grpo().kl.coefficient == 0.04
    assert Grpo(kl=KlPenalty()).needs() == frozenset()


def test_options_that_make_no_sense() -> None:
    assert list(Grpo().problems()) == []
    wrong = Grpo(clip_low=0, clip_high=-1, divisor=3)
    assert [name for name, _ in wrong.problems()] == ["divisor", "clip_low", "clip_high"]


@pytest.mark.parametrize(("accuracies", "kept"), [([1, 1], False), ([0, 0], False), ([0, 1], True), ([0.1] * 8, False)])
def test_dynamic_sampling_drops_groups_that_agree(accuracies: list[float], kept: bool) -> None:
    assert Grpo(dynamic_sampling=True).keep_group(group(accuracies)) is kept
    assert Grpo(dynamic_sampling=False).keep_group(group(accuracies))


def test_dynamic_sampling_looks_at_accuracy_and_not_at_shaped_rewards() -> None:
    assert not Grpo(dynamic_sampling=True).keep_group(group([1, 1, 1], rewards=[1.0, 0.7, 0.2]))
    assert Grpo(dynamic_sampling=True).keep_group(group([1, 0, 1], rewards=[0.5, 0.5, 0.5]))


def test_advantages_reach_sampled_tokens_alone_and_groups_of_equal_text_stay_apart() -> None:
    batch = Batch.from_groups([group([1, 0]), group([5, 5])])
    got = advantages(Grpo(), batch)
    root = 0.5**0.5
    assert got.dtype == np.float32
    assert got.tolist() == pytest.approx([0, 0, root, 0, 0, -root, -root, 0, 0, 0, 0, 0, 0, 0])
    order = np.array([3, 1, 2, 0])
    batch.tokens["advantages"] = got
    moved = batch.select(order)
    assert np.array_equal(advantages(Grpo(), moved), moved.tokens["advantages"])


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("seq-mean-token-mean", [0, 0, 1 / 2, 0, 0, 1 / 4, 1 / 4]),
        ("token-mean", [0, 0, 1 / 3, 0, 0, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum", [0, 0, 1 / 2, 0, 0, 1 / 2, 1 / 2]),
    ],
)
def test_loss_weights_follow_the_aggregation(aggregation, weights: list[float]) -> None:
    batch, algorithm = Batch.from_groups([group([1, 0])]), Grpo(aggregation=aggregation)
    algorithm.prepare(batch)
    assert algorithm.loss_weights(batch).tolist() == pytest.approx(weights)


def test_advantages_in_units_of_the_groups_the_batchs_or_no_deviation() -> None:
    rewards, groups = [1, 0, 10, 0], [0, 0, 1, 1]
    root, whole = 0.5**0.5, (70.75 / 3) ** 0.5  # deviations from 2.75: 1.75² + 2 × 2.75² + 7.25² = 70.75
    assert per_answer(Grpo(), rewards, groups) == pytest.approx([root, -root, root, -root])
    assert per_answer(Grpo(scale="none"), rewards, groups) == [0.5, -0.5, 5, -5]
    batch_wide = per_answer(Grpo(scale="batch"), rewards, groups)
    assert batch_wide == pytest.approx([0.5 / whole, -0.5 / whole, 5 / whole, -5 / whole])


def test_kl_in_the_reward_is_not_blown_up_by_the_groups_spread() -> None:
    penalty = KlPenalty(0.1, "k1", "reward")
    assert [name for name, _ in Grpo(kl=penalty).problems()] == ["kl.place"]
    assert not list(Grpo(kl=penalty, scale="batch").problems())
