"""RAFT++: imitation of right answers, with importance weights and a clip (arXiv 2504.11343, §2).

    J = 1/|D| Σ_i 1/|o_i| Σ_t min(ρ_it, clip(ρ_it, 1-ε, 1+ε)),        D = the answers that are right

Wrong answers take no part and do not count in the mean. A group that is all right is imitated too, for answers are not
compared; one that is all wrong has nothing to imitate. No KL, no entropy bonus.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollcli.algorithms.policy_gradient import Aggregation, Clipped
from rollcli.algorithms.shaping import Shaping
from rollcli.config.schema import Problems
from rollcli.data.batch import Batch


@dataclass
class RaftPp(Clipped):
    """Rejection sampling made a policy gradient."""

    aggregation: Aggregation = "seq-mean-token-mean"
    """How token losses add up."""
    threshold: float = 0.5
    """An answer is right whose accuracy is above this."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        if not 0 <= self.threshold < 1:
            yield "threshold", f"must be in [0, 1), is {self.threshold}: no accuracy is above 1"
        if self.whiten:
            yield "whiten", "every advantage is 1: whitened, all would be 0"
        if self.shaping != Shaping():
            yield "shaping", "an answer is right or wrong by its accuracy, whatever its reward"
        if self.kl.place == "reward" and self.kl.coefficient > 0:
            yield "kl.place", "`reward` would change nothing, every advantage being 1: use `loss`"

    def prepare(self, batch: Batch) -> None:
        """Leaves out wrong answers."""
        super().prepare(batch)
        batch.tokens["loss_mask"] &= (batch.samples["accuracy"] > self.threshold)[batch.rows]

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns 1 for all that are left."""
        return np.ones(len(batch))
