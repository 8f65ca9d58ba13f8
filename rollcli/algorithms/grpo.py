"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, eq. 3).

For G answers o_i to one question, with r_i their rewards and A_i = (r_i - mean r) / std r,

    J = 1/G Σ_i 1/|o_i| Σ_t  min(ρ_it A_i, clip(ρ_it, 1-ε, 1+ε) A_i) - β KL(π ‖ π_ref),     ρ_it = π / π_old

β is the paper's, which gives no ε: that is PPO's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Aggregation, Clipped, GroupNormalized


@dataclass
class Grpo(GroupNormalized, Clipped):
    """Advantages relative to the group, a clipped ratio, and KL to a reference in the loss."""

    aggregation: Aggregation = "seq-mean-token-mean"
    """How token losses add up."""
    kl: KlPenalty = field(default_factory=lambda: KlPenalty(coefficient=0.04))
    """Penalty for leaving the reference model."""
