"""RAFT++: imitation of right answers, with importance weights and a clip (arXiv 2504.11343, §2).

    J = 1/Σ|o_i| Σ_i 1[o_i is right] Σ_t min(ρ_it, clip(ρ_it, 1-ε, 1+ε))

Wrong answers take no part and do not count in the mean. A group that is all right is imitated too: answers are not
compared. The defaults are the paper's: no KL, no entropy bonus.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollcli.algorithms.policy_gradient import Clipped
from rollcli.data.batch import Batch


@dataclass
class RaftPp(Clipped):
    """Rejection sampling made a policy gradient."""

    threshold: float = 0.5
    """An answer is right whose accuracy is above this."""

    def prepare(self, batch: Batch) -> None:
        """Leaves out wrong answers."""
        super().prepare(batch)
        batch.tokens["loss_mask"] &= (batch.samples["accuracy"] > self.threshold)[batch.rows]

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns 1 for all that are left."""
        return np.ones(len(batch))
