"""REINFORCE++-baseline (arXiv 2501.03262, §3.2): the group's mean as baseline, the batch's spread as scale.

    A_i = r_i - mean r of the group,     then mean 0 and standard deviation 1 over all tokens of the batch

with PPO's clipped ratio, and KL in the loss by k2, whose gradient is the true one on-policy. The paper leaves the KL's
weight open; here it is 0.001.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Clipped, GroupNormalized


@dataclass
class ReinforcePpBaseline(GroupNormalized, Clipped):
    """Scores against the group's mean, whitened over the batch."""

    kl: KlPenalty = field(default_factory=lambda: KlPenalty(coefficient=0.001, estimator="k2"))
    """Penalty for leaving the reference model."""
    whiten: bool = True
    """Give the advantages of all trained tokens of a step mean 0 and standard deviation 1."""

    scale: Literal["none"] = "none"
    """The batch's spread is taken by `whiten`."""
