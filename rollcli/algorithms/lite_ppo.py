"""Lite PPO ("Tricks or Traps?", arXiv 2508.08221, §5): two tricks on the critic-free PPO loss that are enough.

    A_i = (r_i - mean r of the group) / std r of the batch,        every token counted alike

A group's own spread exaggerates groups that are nearly all right or wrong; the batch's does not. No KL penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollcli.algorithms.policy_gradient import Clipped, GroupNormalized


@dataclass
class LitePpo(GroupNormalized, Clipped):
    """The mean of the group, the standard deviation of the batch, the mean over tokens."""

    scale: Literal["batch"] = "batch"
    """Dividing by the batch's standard deviation is one of the two tricks."""
