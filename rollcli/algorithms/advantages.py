"""From rewards to advantages: pure NumPy functions on float64.

B trajectories, T tokens. Functions of rewards `[B]` give one value per trajectory; functions of token rewards `[T]`
follow the trained tokens of each trajectory in order and pass over the others, whose values may be anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from rollcli.data.batch import Batch

EQUAL = 1e-6
"""Rewards of a group whose maximum and minimum differ by less are equal: their advantages are exactly 0.

A float32 standard deviation of equal numbers is not 0, and dividing by it moves the weights for no reason.
"""


def per_group(rewards: np.ndarray, groups: np.ndarray, estimate: Callable[..., np.ndarray], *more: np.ndarray):
    """Returns float64 `[B]`: `estimate(rewards of a group, *more of the group)`, exactly 0 where all are equal.

    Args:
        rewards: `[B]`.
        groups: int64 `[B]`, equal within a group; order is free.
        estimate: from float64 `[G]` to `[G]`.
        more: further columns `[B]` it is given.
    """
    advantages = np.zeros(len(rewards), dtype=np.float64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        values = rewards[members].astype(np.float64)
        if values.max() - values.min() >= EQUAL:
            advantages[members] = estimate(values, *(column[members] for column in more))
    return advantages


def group_normalized(
    rewards: np.ndarray, groups: np.ndarray, scale: Literal["group", "batch", "none"] = "group"
) -> np.ndarray:
    """Returns `(r - mean) / std`, the mean within each group, float64 `[B]` (GRPO, arXiv 2402.03300, §4.1.2).

    Args:
        rewards: float64 `[B]`.
        groups: int64 `[B]`, equal within a group; order is free.
        scale: whose standard deviation (with Bessel's correction, as the public implementations do) divides: the
            group's, that of all rewards, or none.
    """
    if scale == "group":
        return per_group(rewards, groups, lambda values: (values - values.mean()) / values.std(ddof=1))
    centered = per_group(rewards, groups, lambda values: values - values.mean())
    return centered if scale == "none" else centered / spread(rewards)


def leave_one_out(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns each reward minus the mean of the others of its group, float64 `[B]` (RLOO, arXiv 2402.14740, §3.2)."""
    return per_group(rewards, groups, lambda values: (values - values.mean()) * len(values) / (len(values) - 1))


def length_weighted(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns rewards minus the group's mean weighted by length, float64 `[B]` (OPO, arXiv 2505.23585, eq. 9)."""
    weights = np.maximum(lengths, EQUAL)
    return per_group(rewards, groups, lambda values, weight: values - np.average(values, weights=weight), weights)


def over_mean(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns `(r - mean) / mean` within each group, float64 `[B]` (MaxRL, arXiv 2602.02710, algorithm 1).

    Meant for rewards in {0, 1}; a group whose mean is not positive gives 0.
    """

    def estimate(values: np.ndarray) -> np.ndarray:
        mean = values.mean()
        return (values - mean) / mean if mean > EQUAL else np.zeros_like(values)

    return per_group(rewards, groups, estimate)


def spread(values: np.ndarray) -> float:
    """Returns the standard deviation of values `[n]`, or 1 where it is 0: equal values stay what they are."""
    return float(values.std(ddof=1)) if len(values) > 1 and np.ptp(values) >= EQUAL else 1.0


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns `(v - mean) / std` over the positions of `mask`, 0 elsewhere, float64 `[T]`.

    Fewer than two positions have no spread and are returned as they are; equal values become 0.
    """
    result = np.zeros(len(values), dtype=np.float64)
    picked = values[mask].astype(np.float64)
    if len(picked) < 2:
        result[mask] = picked
    elif np.ptp(picked) >= EQUAL:
        result[mask] = (picked - picked.mean()) / picked.std(ddof=1)
    return result


def spread_over_tokens(batch: Batch, values: np.ndarray) -> np.ndarray:
    """Gives every trained token its trajectory's value `[B]`, others 0: float64 `[T]`."""
    return np.where(batch.tokens["loss_mask"], values[batch.rows], 0.0)


def discounted_returns(batch: Batch, rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Returns the sum of this token's and, discounted, all later rewards, float64 `[T]`.

    Time counts trained tokens: what an environment says between two of them neither costs a discount nor loses the
    rewards behind it.
    """
    table, places = _table(batch, rewards)
    for column in range(table.shape[1] - 2, -1, -1):
        table[:, column] += gamma * table[:, column + 1]
    return _untable(batch, table, places)


def generalized_advantages(
    batch: Batch, rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Returns generalized advantage estimates, float64 `[T]` (GAE, arXiv 1506.02438, eq. 16).

    Args:
        batch: its loss mask says which tokens are actions; time counts these alone.
        rewards: `[T]`, reward for each token.
        values: `[T]`, value of the state in which each token was sampled; 0 is the value after the last one.
        gamma: discount.
        lam: λ, between one-step differences (0) and whole returns (1).
    """
    delta, places = _table(batch, rewards)
    value, _ = _table(batch, values)
    delta -= value
    delta[:, :-1] += gamma * value[:, 1:]
    for column in range(delta.shape[1] - 2, -1, -1):
        delta[:, column] += gamma * lam * delta[:, column + 1]
    return _untable(batch, delta, places)


def _table(batch: Batch, column: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Returns the trained tokens' values one trajectory per row, `[B, longest]`, zeros behind, and their places."""
    mask = batch.tokens["loss_mask"]
    rows = batch.rows[mask]
    counts = np.bincount(rows, minlength=len(batch))
    order = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.zeros((len(batch), max(int(counts.max(initial=0)), 1)), dtype=np.float64)
    table[rows, order] = column[mask]
    return table, (rows, order)


def _untable(batch: Batch, table: np.ndarray, places: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    result = np.zeros(int(batch.offsets[-1]), dtype=np.float64)
    result[batch.tokens["loss_mask"]] = table[places]
    return result
