"""KL estimators: values and gradients at lp -1, ref -2, and the expectation of each."""

import pytest
import torch

from rollcli.algorithms import kl


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"), [(kl.k1, 1.0, 1.0), (kl.k2, 0.5, 1.0), (kl.k3, 0.36788, 0.63212)]
)
def test_value_and_gradient(estimator, value: float, gradient: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    penalty = estimator(logprobs - torch.tensor([-2.0]))
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(value, abs=1e-5)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-5)


def test_no_difference_costs_nothing() -> None:
    for estimator in (kl.k1, kl.k2, kl.k3):
        difference = torch.zeros(3, requires_grad=True)
        estimator(difference).sum().backward()
        assert estimator(difference).tolist() == [0.0] * 3
        assert estimator is kl.k1 or difference.grad.tolist() == [0.0] * 3


def test_expectations_over_a_distribution() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    difference = policy.log() - reference.log()
    true = (policy * difference).sum()
    assert (policy * kl.k1(difference)).sum() == pytest.approx(true)
    assert (policy * kl.k3(difference)).sum() == pytest.approx(true)
    assert (kl.k3(difference) >= 0).all() and (kl.k2(difference) >= 0).all()


def test_gradient_of_k2_is_the_true_one_on_policy() -> None:
    """E_p[grad k2] over a 3-token softmax equals the gradient of KL(p || ref)."""
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    estimate = (logprobs.exp().detach() * kl.k2(logprobs - reference)).sum()
    (got,) = torch.autograd.grad(estimate, logits)
    assert got.tolist() == pytest.approx(true.tolist())
