"""SAPO: Soft Adaptive Policy Optimization (arXiv 2511.20347, eq. 5).

    J = 1/G Σ_i 1/|o_i| Σ_t f(ρ_it) A_i,        f(ρ) = 4/τ σ(τ (ρ - 1))

with GRPO's advantages. A smooth gate in place of the clip: the gradient's weight is 1 on-policy and fades with the
distance, faster (τ_negative) where the advantage is negative. The defaults are the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollcli.algorithms import surrogates
from rollcli.algorithms.base import TrainedTokens
from rollcli.algorithms.policy_gradient import Aggregation, GroupNormalized
from rollcli.config.schema import Problems, positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Sapo(GroupNormalized):
    """A soft gate on each token's ratio."""

    aggregation: Aggregation = "seq-mean-token-mean"
    """How token losses add up."""
    tau_positive: float = 1.0
    """Temperature of the gate where the advantage is positive."""
    tau_negative: float = 1.05
    """Temperature of the gate elsewhere; higher fades faster."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        yield from positive(self, "tau_positive", "tau_negative")

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Gates each token."""
        ratio = surrogates.ratio(tokens.logprobs, tokens.old_logprobs)
        return surrogates.soft_gate(ratio, tokens.advantages, self.tau_positive, self.tau_negative), {}
