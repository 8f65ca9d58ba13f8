"""Estimators of KL(policy ‖ reference) from the log-probabilities of sampled tokens (Schulman, "Approximating KL").

`difference` is `logprobs - reference_logprobs`; all return one value per token, in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def k1(difference: Tensor) -> Tensor:
    """Unbiased, high variance, may be negative."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """Half the squared difference: biased, low variance, and its gradient is the true one on-policy."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """Unbiased, never negative: `exp(-d) - 1 + d` (GRPO, arXiv 2402.03300, eq. 4)."""
    return (-difference).exp() - 1 + difference
