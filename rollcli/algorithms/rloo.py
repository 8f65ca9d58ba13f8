"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740, §3.2).

    ∇J = 1/G Σ_i A_i ∇log π(o_i),        A_i = R_i - 1/(G-1) Σ_{j≠i} R_j,        R_i = r_i - β log π(o_i)/π_ref(o_i)

The answer is one action: its tokens' KL comes off its reward as a sum, and its log-probability is that of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rollcli.algorithms.advantages import leave_one_out
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Unclipped
from rollcli.data.batch import Batch


@dataclass
class Rloo(Unclipped):
    """Each answer against the mean of the group's others."""

    kl: KlPenalty = field(default_factory=lambda: KlPenalty(coefficient=0.03, estimator="k1", place="reward"))
    """Penalty for leaving the reference model."""

    group_relative: ClassVar[bool] = True

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns the score against the others'."""
        return leave_one_out(scores, batch.samples["group"])
