"""KL estimators and the penalty made of them: values, gradients, and what their expectations are."""

import math

import numpy as np
import pytest
import torch

from rollcli.algorithms import kl
from rollcli.algorithms.kl import KlPenalty
from tests.algorithms.batches import batch_of, finite_differences, trained

ALL = ["k1", "k2", "k3", "k3+"]
LOGITS = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", 0.36788, 0.63212), ("k3+", 0.36788, 1.0)],
)
def test_value_and_gradient_one_above_the_reference(estimator: str, value: float, gradient: float) -> None:
    tokens = trained([-1.0], reference_logprobs=[-2.0])
    penalty, metrics = KlPenalty(1.0, estimator).loss(tokens)
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(value, abs=1e-5)
    assert tokens.logprobs.grad.item() == pytest.approx(gradient, abs=1e-5)
    assert metrics["kl_penalty"].item() == pytest.approx(value, abs=1e-5)
    assert not metrics["kl_penalty"].requires_grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("difference", [-1.5, -0.1, 0.4, 2.0])
def test_gradients_against_finite_differences(estimator: str, difference: float) -> None:
    at = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(kl.ESTIMATORS[estimator](at).sum(), at)
    assert got.tolist() == pytest.approx(finite_differences(kl.ESTIMATORS[estimator], at), abs=1e-7)
    array = kl.ESTIMATORS[estimator](np.array([difference]))
    assert isinstance(array, np.ndarray) and array.tolist() == pytest.approx(kl.ESTIMATORS[estimator](at).tolist())


def test_no_difference_costs_nothing() -> None:
    for estimator in ALL:
        difference = torch.zeros(3, requires_grad=True)
        kl.ESTIMATORS[estimator](difference).sum().backward()
        assert kl.ESTIMATORS[estimator](difference).tolist() == [0.0] * 3
        assert estimator == "k1" or difference.grad.tolist() == [0.0] * 3


def test_values_in_expectation() -> None:
    policy = LOGITS.softmax(-1)
    difference = policy.log() - REFERENCE
    true = (policy * difference).sum()
    for estimator in ("k1", "k3", "k3+"):
        assert (policy * kl.ESTIMATORS[estimator](difference)).sum() == pytest.approx(true)
    assert (kl.k3(difference) >= 0).all() and (kl.k2(difference) >= 0).all()
    assert kl.full(LOGITS.expand(2, 3), REFERENCE.expand(2, 3)).tolist() == pytest.approx([float(true)] * 2)


def divergence(logits: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def reverse_divergence(logits: torch.Tensor) -> torch.Tensor:
    return (REFERENCE.exp() * (REFERENCE - logits.log_softmax(-1))).sum()


def expected_gradient(penalty: KlPenalty, old: torch.Tensor | None = None) -> list[float]:
    """Returns the mean gradient of the loss by the logits, over all three tokens as the old policy samples them."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    old = logprobs.detach() if old is None else old
    tokens = trained([0.0] * 3, old, reference_logprobs=REFERENCE, reference_distribution=REFERENCE.expand(3, 3))
    tokens.logprobs, tokens.logits = logprobs, logits.expand(3, 3)
    loss, _ = penalty.loss(tokens)
    return torch.autograd.grad((old.exp() * loss).sum(), logits)[0].tolist()


@pytest.mark.parametrize("estimator", ["k2", "k3+", "full"])
def test_estimators_whose_gradient_is_the_true_one_on_policy(estimator: str) -> None:
    true = finite_differences(divergence, LOGITS)
    assert expected_gradient(KlPenalty(1.0, estimator)) == pytest.approx(true, abs=1e-7)
    assert expected_gradient(KlPenalty(0.25, estimator)) == pytest.approx([slope / 4 for slope in true], abs=1e-7)


def test_gradient_of_k1_is_nothing_and_of_k3_that_of_the_reverse_divergence() -> None:
    assert expected_gradient(KlPenalty(1.0, "k1")) == pytest.approx([0.0] * 3, abs=1e-12)
    assert expected_gradient(KlPenalty(1.0, "k3")) == pytest.approx(
        finite_differences(reverse_divergence, LOGITS), abs=1e-7
    )


@pytest.mark.parametrize("estimator", ["k1", "k3", "full"])
@pytest.mark.parametrize("old", [None, [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
def test_unbiased_gradient_is_the_true_one_on_and_off_policy(estimator: str, old: list[float] | None) -> None:
    old = None if old is None else torch.tensor(old, dtype=torch.float64).log()
    got = expected_gradient(KlPenalty(1.0, estimator, unbiased_gradient=True), old)
    assert got == pytest.approx(finite_differences(divergence, LOGITS), abs=1e-7)


def test_gradient_of_the_whole_distribution() -> None:
    logits = torch.tensor([[0.3, -0.2, 0.9], [2.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(kl.full(logits, REFERENCE.expand(2, 3)).sum(), logits)
    expected = finite_differences(lambda at: kl.full(at, REFERENCE.expand(2, 3)), logits)
    assert got.flatten().tolist() == pytest.approx(expected, abs=1e-7)


def test_a_penalty_in_the_reward_is_taken_off_each_trained_token() -> None:
    batch = batch_of([".00", ".0"], old_logprobs=[9, -1, -1, 9, -1], reference_logprobs=[0, -2, -0.5, np.nan, -1])
    got = KlPenalty(0.1, "k1", "reward").rewards(batch)
    assert got.dtype == np.float64
    assert got.tolist() == pytest.approx([0, -0.1, 0.05, 0, 0])
    squares = KlPenalty(0.1, "k2", "reward").rewards(batch)
    assert squares.tolist() == pytest.approx([0, -0.05, -0.0125, 0, 0])
    third = KlPenalty(0.1, "k3", "reward").rewards(batch)
    assert third.tolist() == pytest.approx([0, -0.1 * math.exp(-1), -0.1 * (math.exp(0.5) - 1.5), 0, 0])
    assert not KlPenalty(0.1, "k1", "loss").rewards(batch).any()
    assert not KlPenalty(0.0, "k1", "reward").rewards(batch).any()


def test_a_penalty_in_the_reward_or_none_adds_nothing_to_the_loss() -> None:
    tokens = trained([-1.0], reference_logprobs=[-2.0])
    assert KlPenalty(0.5, "k1", "reward").loss(tokens) == KlPenalty(0.0).loss(tokens) == (0.0, {})


def test_adapting_is_by_a_fifth_at_most_and_not_by_what_is_no_number() -> None:
    penalty = KlPenalty(0.1, target=0.1, horizon=64)
    penalty.observe(float("nan"), 512)
    assert penalty.current == 0.1
    penalty.observe(0.0, 512)
    assert penalty.current == pytest.approx(0.08)


def test_a_word_that_cannot_be_said_adds_nothing_to_the_whole_divergence() -> None:
    logits = torch.tensor([[1.0, 0.0, -math.inf]], requires_grad=True)
    reference = torch.tensor([[0.0, 0.0, -math.inf]]).log_softmax(-1)
    value = kl.full(logits, reference)
    value.sum().backward()
    shares = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]
    assert value.item() == pytest.approx(sum(p * math.log(p / 0.5) for p in shares), abs=1e-6)
    assert torch.isfinite(logits.grad).all()


def test_loss_rises_with_the_coefficient_on_either_side_of_the_reference() -> None:
    for reference in (-2.0, -0.5):
        tokens = trained([-1.0], reference_logprobs=[reference])
        penalties = [KlPenalty(beta, "k3").loss(tokens)[0] for beta in (0.0, 0.1, 0.2)]
        assert penalties[0] < penalties[1] < penalties[2]


def test_without_a_coefficient_there_is_no_reference() -> None:
    for estimator in [*ALL, "full"]:
        assert KlPenalty(0.0, estimator).needs() == set()
        assert KlPenalty(0.0, estimator).loss(trained([-1.0])) == (0.0, {})
    assert KlPenalty(0.1).needs() == {"reference"}
    assert KlPenalty(0.1, place="reward").needs() == {"reference", "old"}
    assert KlPenalty(0.1, "full").needs() == {"reference", "reference_distribution"}


@pytest.mark.parametrize(
    ("measured", "samples", "factor"),
    [
        (0.1, 1000, 1.0),  # on target
        (0.11, 1000, 1.01),  # a tenth above, a tenth of the horizon
        (0.2, 1000, 1.02),  # far above: a fifth is the most
        (0.0, 1000, 0.98),
        (0.2, 10000, 1.2),
        (0.2, 0, 1.0),
    ],
)
def test_the_coefficient_follows_the_target(measured: float, samples: int, factor: float) -> None:
    penalty = KlPenalty(0.5, target=0.1, horizon=10000)
    penalty.observe(measured, samples)
    assert penalty.current == pytest.approx(0.5 * factor)
    penalty.observe(measured, samples)
    assert penalty.current == pytest.approx(0.5 * factor**2) and penalty.coefficient == 0.5


def test_the_adapted_coefficient_weighs_loss_and_reward_and_is_told() -> None:
    penalty = KlPenalty(0.5, "k1", target=0.1, horizon=1000)
    penalty.observe(1.0, 1000)
    loss, metrics = penalty.loss(trained([-1.0, -1.0], reference_logprobs=[-2.0, -3.0]))
    assert loss.tolist() == pytest.approx([0.6, 1.2])
    assert metrics["kl_coefficient"].tolist() == pytest.approx([0.6, 0.6])
    inside = KlPenalty(0.5, "k1", "reward", target=0.1, horizon=1000)
    inside.restore(penalty.state())
    assert inside.rewards(batch_of(["0"], old_logprobs=[1.0])).tolist() == pytest.approx([-0.6])


def test_a_fixed_coefficient_stays_and_has_no_state() -> None:
    penalty = KlPenalty(0.5)
    penalty.observe(10.0, 1000)
    assert penalty.current == 0.5 and penalty.state() == {}
    assert "kl_coefficient" not in penalty.loss(trained([-1.0], reference_logprobs=[-2.0]))[1]


def test_state_is_a_copy_and_goes_on_after_a_restore() -> None:
    first, second = (KlPenalty(0.5, target=0.1, horizon=100) for _ in range(2))
    first.observe(0.2, 10)
    second.restore(first.state())
    first.state()["coefficient"] = 99.0
    for penalty in (first, second):
        penalty.observe(0.0, 10)
    assert first.current == second.current != 0.5
    assert first == KlPenalty(0.5, target=0.1, horizon=100), "what a run adapts is not an option"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"coefficient": -0.1}, ["coefficient"]),
        ({"coefficient": 0.1, "target": 0.0}, ["target"]),
        ({"horizon": 0}, ["horizon"]),
        ({"place": "reward", "estimator": "full"}, ["estimator"]),
        ({"place": "reward", "estimator": "k3+"}, ["estimator"]),
        ({"place": "reward", "estimator": "k3"}, []),
        ({"place": "reward", "unbiased_gradient": True}, ["unbiased_gradient"]),
        ({"estimator": "k2", "unbiased_gradient": True}, ["unbiased_gradient"]),
        ({"estimator": "full", "unbiased_gradient": True}, ["unbiased_gradient"]),
        ({"estimator": "k3+", "unbiased_gradient": True}, ["unbiased_gradient"]),
        ({"estimator": "k3", "unbiased_gradient": True}, []),
        ({"target": 0.1}, ["coefficient"]),
        ({"target": 0.1, "coefficient": 0.01}, []),
    ],
)
def test_options_that_make_no_sense(options: dict, names: list[str]) -> None:
    assert [name for name, _ in KlPenalty(**options).problems()] == names


def test_a_token_far_from_the_reference_is_pulled_back_and_stays_finite() -> None:
    for estimator in ("k3", "k3+"):
        tokens = trained([-100.0], reference_logprobs=[-1.0])
        penalty, _ = KlPenalty(1.0, estimator).loss(tokens)
        penalty.sum().backward()
        assert math.isfinite(penalty.item()) and math.isfinite(tokens.logprobs.grad.item())
        assert tokens.logprobs.grad.item() < -90, "a descent step makes the token more probable"
