"""The frame of policy-gradient algorithms: how its blocks are put together, and what a step asks of it."""

import math

import numpy as np
import pytest
import torch

from rollcli.algorithms.correction import Correction
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.masking import Masking
from rollcli.algorithms.policy_gradient import Clipped, PolicyGradient, Unclipped
from rollcli.algorithms.shaping import Shaping
from rollcli.data.carriers import Group, Task, Trajectory
from tests.algorithms.batches import REWARDED, advantages, batch_of, finite_differences, gradient, made, trained


@pytest.mark.parametrize("name", REWARDED)
def test_on_policy_every_algorithm_has_the_policy_gradient(name: str) -> None:
    """At ratio 1 the slope of a token's loss is minus its advantage, whatever is done away from there."""
    values = [1.5, 1.5, -0.5, -0.5, 0.0]
    tokens = trained([-0.3, -7.1, -1e-4, -2.0, -1.0], advantages=values, rows=[0, 0, 1, 1, 2])
    algorithm = made(name, kl=KlPenalty())
    assert gradient(algorithm, tokens) == pytest.approx([-value for value in values])
    _, metrics = algorithm.loss(tokens)
    assert not any(column.requires_grad for column in metrics.values())
    assert metrics.get("clip_share", torch.zeros(1)).sum() == 0


@pytest.mark.parametrize("name", REWARDED)
def test_impossible_tokens_give_a_finite_loss_and_gradient(name: str) -> None:
    tokens = trained([-300.0, -1.0, -1.0], [-1.0, -300.0, -1.0], advantages=[1.0, 1.0, -1.0], rows=[0, 1, 1])
    algorithm = made(name, kl=KlPenalty())
    assert torch.isfinite(algorithm.loss(tokens)[0]).all() and np.isfinite(gradient(algorithm, tokens)).all()


def test_penalty_correction_and_entropy_are_put_together() -> None:
    logits = torch.tensor([[0.3, -0.2], [1.0, 0.0]], dtype=torch.float64)
    tokens = trained(
        [-1.0, -2.0], [-1.1, -2.0], advantages=[2.0, -1.0], rollout_logprobs=[-1.1 - math.log(1.5), -2.0],
        reference_logprobs=[-2.0, -2.5], logits=logits,
    )  # fmt: skip
    algorithm = Unclipped(
        kl=KlPenalty(0.1, "k2"), correction=Correction("truncate", high=1.25), entropy_coefficient=0.01
    )
    entropies = (-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)).tolist()
    loss, metrics = algorithm.loss(tokens)
    # The correction weighs the policy's loss and not the penalty; the bonus comes off.
    assert loss.tolist() == pytest.approx([
        1.25 * -2 * math.exp(0.1) + 0.1 * 0.5 - 0.01 * entropies[0], 1 + 0.1 * 0.125 - 0.01 * entropies[1],
    ])  # fmt: skip
    assert set(metrics) == {"kl_penalty", "correction_weight", "correction_clipped"}


def test_gradient_of_the_whole_loss_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    start, old, reference, rollout, values = torch.randn(5, 12, generator=generator, dtype=torch.float64) * 0.4
    algorithm = Clipped(kl=KlPenalty(0.3), correction=Correction("mask", "sequence", 0.2, 4.0), dual_clip=2.0)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        tokens = trained(logprobs, old, advantages=values, rows=[0] * 5 + [1] * 7, rollout_logprobs=rollout,
                         reference_logprobs=reference)  # fmt: skip
        return algorithm.loss(tokens)[0].detach()

    tokens = trained(start, old, advantages=values, rows=[0] * 5 + [1] * 7, rollout_logprobs=rollout,
                     reference_logprobs=reference)  # fmt: skip
    assert gradient(algorithm, tokens) == pytest.approx(finite_differences(loss, start), abs=1e-6)


def test_a_reference_above_the_policy_and_below_it_both_raise_the_loss() -> None:
    for reference in (-2.0, -0.5):
        losses = [
            Clipped(kl=KlPenalty(beta)).loss(trained([-1.0], reference_logprobs=[reference]))[0].item()
            for beta in (0.0, 0.1, 0.2)
        ]
        assert losses[0] < losses[1] < losses[2]


def test_a_score_less_the_kl_of_its_tokens() -> None:
    """KL 0.1 and 0.2 on two tokens, score 1, coefficient 1: 0.7, counted once."""
    batch = batch_of([".00"], [1.0], old_logprobs=[0, -1, -1], reference_logprobs=[0, -1.1, -1.2])
    algorithm = Unclipped(kl=KlPenalty(1.0, "k1", "reward"))
    assert advantages(algorithm, batch).tolist() == pytest.approx([0, 0.7, 0.7])


def test_whitening_then_clipping() -> None:
    batch = batch_of([".0", ".0", ".0", ".0"], [0, 0, 0, 4])  # mean 1, standard deviation 2
    assert advantages(Unclipped(whiten=True), batch)[1::2].tolist() == [-0.5, -0.5, -0.5, 1.5]
    assert advantages(Unclipped(whiten=True, advantage_clip=1), batch)[1::2].tolist() == [-0.5, -0.5, -0.5, 1]
    assert advantages(Unclipped(advantage_clip=1), batch)[1::2].tolist() == [0, 0, 0, 1]


def test_whitening_counts_every_trained_token() -> None:
    batch = batch_of([".000", "..0"], [0, 4])  # 0, 0, 0, 4 as above
    assert advantages(Unclipped(whiten=True), batch).tolist() == [0, -0.5, -0.5, -0.5, 0, 0, 1.5]


def test_shaped_scores_are_what_advantages_are_made_of() -> None:
    batch = batch_of([".0", ".0"], [30, -2])
    algorithm = Unclipped(shaping=Shaping(clip=[-1, 1]))
    assert advantages(algorithm, batch)[1::2].tolist() == [1, -1]
    assert batch.samples["reward"].tolist() == [30, -2]


def test_masked_answers_leave_the_denominator_and_stay_in_the_baseline() -> None:
    batch = batch_of(["0000", "0000"], [1, 0], truncated=[False, True])
    algorithm = made("grpo", masking=Masking(truncated=True), scale="none")
    algorithm.prepare(batch)
    assert algorithm.loss_weights(batch).tolist() == [0.25] * 4 + [0] * 4
    assert algorithm.advantages(batch).tolist() == [0.5] * 4 + [0] * 4


@pytest.mark.parametrize(
    ("aggregation", "divisor", "weights"),
    [
        ("token-mean", None, [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-mean", None, [1 / 2, 0, 1 / 6, 1 / 6, 1 / 6]),
        ("seq-mean-token-sum", None, [1 / 2, 0, 1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-sum-norm", 5, [1 / 10, 0, 1 / 10, 1 / 10, 1 / 10]),
        ("seq-mean-token-sum-norm", None, [1 / 200, 0, 1 / 200, 1 / 200, 1 / 200]),
    ],
)
def test_loss_weights_follow_aggregation_and_each_answers_own_weight(aggregation, divisor, weights) -> None:
    batch = batch_of(["0", ".000"])
    algorithm = PolicyGradient(aggregation=aggregation, divisor=divisor)
    algorithm.prepare(batch)
    assert algorithm.loss_weights(batch).tolist() == pytest.approx(weights)
    batch.samples["weight"] = np.array([3.0, 0.5])
    doubled = [weight * (3 if index == 0 else 0.5) for index, weight in enumerate(weights)]
    assert algorithm.loss_weights(batch).tolist() == pytest.approx(doubled)


def test_answers_weigh_by_difficulty_and_length() -> None:
    batch = batch_of(["0", ".000"], None, [0, 1], accuracy=[0.5, 0.0])
    algorithm = PolicyGradient(masking=Masking(difficulty_weight=1, length_weight=1))
    algorithm.prepare(batch)
    assert batch.samples["weight"].tolist() == pytest.approx([0.5 * 2, 1 * 2 / 3])


def group(accuracies: list[float], rewards: list[float] | None = None, failed: int = 0) -> Group:
    task = Task("t", 0, [])
    tokens = np.zeros(1, np.int32)
    members = [
        Trajectory(task.id, sample, tokens, tokens == 0, tokens.astype(float), tokens, reward=reward, accuracy=accuracy)
        for sample, (accuracy, reward) in enumerate(zip(accuracies, rewards or accuracies, strict=True))
    ]
    return Group(
        task, members + [Trajectory.failed(task, len(members) + extra, "engine", "") for extra in range(failed)]
    )


@pytest.mark.parametrize(
    ("accuracies", "kept"),
    [([1, 1], False), ([0, 0], False), ([0, 1], True), ([0.1] * 8, False), ([0.1 + 0.2, 0.3], False), ([0.5], False)],
)
def test_dynamic_sampling_drops_groups_that_agree(accuracies: list[float], kept: bool) -> None:
    assert PolicyGradient(dynamic_sampling=True).keep_group(group(accuracies)) is kept
    assert PolicyGradient(dynamic_sampling=True).keep_group(group(accuracies, failed=1)) is kept
    assert PolicyGradient(dynamic_sampling=False).keep_group(group(accuracies))


def test_dynamic_sampling_looks_at_accuracy_and_not_at_shaped_rewards() -> None:
    algorithm = PolicyGradient(dynamic_sampling=True)
    assert not algorithm.keep_group(group([1, 1, 1], rewards=[1.0, 0.7, 0.2]))
    assert algorithm.keep_group(group([1, 0, 1], rewards=[0.5, 0.5, 0.5]))


def test_what_is_needed_follows_the_penalty() -> None:
    assert PolicyGradient().needs() == frozenset()
    assert PolicyGradient(kl=KlPenalty(0.1)).needs() == {"reference"}
    assert PolicyGradient(kl=KlPenalty(0.1, place="reward")).needs() == {"reference", "old"}


def test_answers_are_compared_where_shaping_takes_the_groups_mean_off() -> None:
    assert not PolicyGradient().compares_group() and not PolicyGradient(shaping=Shaping(mean="batch")).compares_group()
    assert PolicyGradient(shaping=Shaping(mean="group")).compares_group()


def test_whose_logprobs_are_the_old_policys() -> None:
    assert not PolicyGradient().old_from_rollout
    assert PolicyGradient(correction=Correction(old_logprobs="rollout")).old_from_rollout


def test_state_goes_on_after_a_restore() -> None:
    def fresh() -> PolicyGradient:
        return Unclipped(kl=KlPenalty(0.1, target=0.05, horizon=100), shaping=Shaping(mean="running", std="running"))

    first, second = fresh(), fresh()
    first.observe({"kl_reference": 1.0, "other": 3.0}, samples=50)
    advantages(first, batch_of(["0"] * 3, [1, 5, 3]))
    assert first.kl.current == pytest.approx(0.11)
    second.restore(first.state())
    later = batch_of(["0"] * 2, [4, -1])
    for algorithm in (first, second):
        algorithm.observe({"kl_reference": 0.0}, samples=50)
        algorithm.observe({}, samples=50)
    assert advantages(first, later).tolist() == advantages(second, later).tolist()
    assert first.state() == second.state() and first.kl.current == pytest.approx(0.11 * 0.9)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"divisor": 0, "aggregation": "seq-mean-token-sum-norm"}, ["divisor"]),
        ({"divisor": 5}, ["divisor"]),
        ({"divisor": 5, "aggregation": "seq-mean-token-sum-norm"}, []),
        ({"advantage_clip": 0}, ["advantage_clip"]),
        ({"entropy_coefficient": -1}, ["entropy_coefficient"]),
        ({"clip_low": 0, "clip_high": -1}, ["clip_low", "clip_high"]),
        ({"clip_low": 1.5}, ["clip_low"]),
        ({"clip_low": 1.0}, []),
        ({"dual_clip": 1.0}, ["dual_clip"]),
        ({"dual_clip": 3.0}, []),
    ],
)
def test_options_that_make_no_sense(options: dict, names: list[str]) -> None:
    assert [name for name, _ in Clipped(**options).problems()] == names


def test_frames_leave_the_loss_to_others() -> None:
    with pytest.raises(NotImplementedError):
        PolicyGradient().loss(trained([-1.0]))


def test_clipped_and_unclipped_by_hand() -> None:
    tokens = trained([0.0, 0.0], [-math.log(1.5), -math.log(1.5)], advantages=[1.0, -1.0])
    loss, metrics = Clipped().loss(tokens)
    assert loss.tolist() == pytest.approx([-1.2, 1.5]) and metrics["clip_share"].tolist() == [1, 0]
    loss, metrics = Unclipped().loss(tokens)
    assert loss.tolist() == pytest.approx([-1.5, 1.5]) and metrics == {}
    assert gradient(Unclipped(), tokens) == pytest.approx([-1.5, 1.5])


def test_all_minibatches_share_the_constant_divisor() -> None:
    batch = batch_of(["0", "0"], budget=[4, 8])
    algorithm = Unclipped(aggregation="seq-mean-token-sum-norm")
    algorithm.prepare(batch)
    for row in (0, 1):
        assert algorithm.loss_weights(batch.select(np.array([row]))).tolist() == [1 / 8]
