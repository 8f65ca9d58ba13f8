"""From rewards to advantages: pure NumPy functions on float64."""

from __future__ import annotations

from typing import Literal

import numpy as np

EQUAL = 1e-8
"""Rewards of a group whose maximum and minimum differ by less are equal: their advantages are exactly 0.

A float32 standard deviation of equal numbers is not 0, and dividing by it moves the weights for no reason.
"""


def group_normalized(rewards: np.ndarray, groups: np.ndarray, scale: Literal["std", "none"] = "std") -> np.ndarray:
    """Returns `(r - mean) / std` within each group, float64 `[B]` (GRPO, arXiv 2402.03300, §4.1.2).

    Args:
        rewards: float64 `[B]`.
        groups: int64 `[B]`, equal within a group; order is free.
        scale: `std` divides by the group's standard deviation (with Bessel's correction, as the public
            implementations do); `none` only subtracts the mean.
    """
    advantages = np.zeros(len(rewards), dtype=np.float64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        values = rewards[members].astype(np.float64)
        if values.max() - values.min() < EQUAL:
            continue
        centered = values - values.mean()
        advantages[members] = centered / values.std(ddof=1) if scale == "std" else centered
    return advantages
