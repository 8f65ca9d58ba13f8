"""Lite PPO ("Tricks or Traps?", arXiv 2508.08221, §5): two tricks on the critic-free PPO loss that are enough.

    A_i = (r_i - mean r of the group) / std r of the batch,        every token counted alike

A group's own spread exaggerates groups that are nearly all right or wrong; the batch's does not. No KL penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rollcli.algorithms.advantages import group_normalized
from rollcli.algorithms.policy_gradient import Clipped
from rollcli.data.batch import Batch


@dataclass
class LitePpo(Clipped):
    """The mean of the group, the standard deviation of the batch, the mean over tokens."""

    group_relative: ClassVar[bool] = True

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns the score relative to the group, in units of the batch."""
        return group_normalized(scores, batch.samples["group"], "batch")
