"""OPO: on-policy RL with the optimal reward baseline (arXiv 2505.23585, eq. 9).

    ∇J ∝ Σ_i A_i ∇log π(o_i),        A_i = r_i - Σ_j |o_j| r_j / Σ_j |o_j|

The baseline weighted by length has the least variance where gradient norms grow with length. Exactly on-policy: one
update a rollout (`minibatches: 1`), no clip, no KL, no standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rollcli.algorithms.advantages import length_weighted
from rollcli.algorithms.policy_gradient import Aggregation, Unclipped
from rollcli.data.batch import Batch


@dataclass
class Opo(Unclipped):
    """Each answer against the group's mean weighted by length."""

    aggregation: Aggregation = "token-mean"
    """How token losses add up."""

    group_relative: ClassVar[bool] = True

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns the score above the optimal baseline."""
        return length_weighted(scores, batch.samples["group"], batch.samples["sampled"])
