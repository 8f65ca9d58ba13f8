"""ReMax (arXiv 2310.10505, algorithm 1): REINFORCE whose baseline is the reward of the greedy answer.

    ∇J = (r(o) - r(o_greedy)) ∇log π(o)

One answer to each problem is enough; one more, the greedy one, is sampled for each and not trained on. KL is taken off
the reward, as there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Unclipped
from rollcli.algorithms.shaping import Shaping
from rollcli.config.schema import Problems
from rollcli.data.batch import Batch


@dataclass
class ReMax(Unclipped):
    """Each answer against the greedy one."""

    kl: KlPenalty = field(default_factory=lambda: KlPenalty(coefficient=0.1, estimator="k1", place="reward"))
    """Penalty for leaving the reference model."""

    greedy_baseline: ClassVar[bool] = True

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        if self.shaping != Shaping():
            yield "shaping", "would move the answer's reward and not the greedy one's, which it is compared with"

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns the score against the greedy answer's reward."""
        return scores - batch.samples["greedy_reward"]
