"""MaxRL: maximum-likelihood reinforcement learning (arXiv 2602.02710, algorithm 1).

    A_i = (r_i - mean r) / mean r,        0 where no answer is right

Dividing by the mean weighs a problem by one over its success rate: in place of the success rate, its logarithm grows.
For rewards of 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rollcli.algorithms.advantages import over_mean
from rollcli.algorithms.policy_gradient import Clipped
from rollcli.algorithms.shaping import Shaping
from rollcli.config.schema import Problems
from rollcli.data.batch import Batch


@dataclass
class MaxRl(Clipped):
    """Advantages in units of the group's success rate."""

    group_relative: ClassVar[bool] = True

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        if self.shaping != Shaping():
            yield "shaping", "makes other numbers of rewards than 0 and 1, whose mean is not a success rate"
        if self.kl.place == "reward" and self.kl.coefficient > 0:
            yield "kl.place", "`reward` makes other numbers of rewards than 0 and 1: use `loss`"

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns the score relative to the group's mean."""
        return over_mean(scores, batch.samples["group"])
