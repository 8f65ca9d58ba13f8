"""Which problem of a data set comes next, and the record of how often each was solved.

    uniform      every problem once an epoch, in a shuffled order
    difficulty   problems that are sometimes solved: p (1 - p), the variance of the reward, plus a floor
    curriculum   easy ones first: problems whose pass rate is near 1 at the start, near 0 at the end of the run

A draw is a function of (seed, how many were made, the record at that time), so a checkpoint that keeps the record and
the count repeats it. A problem not yet seen counts as solved half the time: what `difficulty` likes best, and a
curriculum comes to in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import numpy as np

Sampler = Literal["uniform", "difficulty", "curriculum"]
UNSEEN = 0.5
FLOOR = 0.02
"""Weight of a problem that is always or never solved; one at half is 0.25."""
WIDTH = 0.2
"""How far from the wanted pass rate a curriculum strays (standard deviation)."""
RECENT = 0.3
"""Weight of the newest result at least: the policy that gave the old ones is gone."""


class PassRates:
    """Mean accuracy of every problem that was sampled, recent results first.

    Args:
        size: problems of the data set.
    """

    def __init__(self, size: int) -> None:
        self.learned = 0
        self.counts = np.zeros(size, dtype=np.int64)
        self.rates = np.full(size, UNSEEN, dtype=np.float64)

    def record(self, row: int, accuracy: float) -> None:
        """Takes in a group's mean accuracy in [0, 1]."""
        self.learned += 1
        self.counts[row] += 1
        self.rates[row] += (accuracy - self.rates[row]) * max(1 / self.counts[row], RECENT)

    def state(self) -> dict[str, list]:
        """Returns what a checkpoint keeps: rows seen, how often, and their rates."""
        seen = np.flatnonzero(self.counts)
        return {"rows": seen.tolist(), "counts": self.counts[seen].tolist(), "rates": self.rates[seen].tolist()}

    def restore(self, state: Mapping[str, list]) -> None:
        """Goes on from a state."""
        self.learned += 1
        self.counts[:], self.rates[:] = 0, UNSEEN
        self.counts[state["rows"]] = state["counts"]
        self.rates[state["rows"]] = state["rates"]


def weights(sampler: Sampler, rates: np.ndarray, progress: float) -> np.ndarray:
    """Returns how much each problem is wanted, `[size]`, not normalized.

    Args:
        sampler: `difficulty` or `curriculum`.
        rates: pass rates, `[size]`.
        progress: share of the run that is done, in [0, 1].
    """
    if sampler == "difficulty":
        return rates * (1 - rates) + FLOOR
    return np.exp(-(((rates - (1 - progress)) / WIDTH) ** 2) / 2) + FLOOR


def shuffled(seed: int, index: int, size: int) -> int:
    """Returns the row of draw `index` when every row comes once an epoch."""
    epoch, place = divmod(index, size)
    return int(_permutation(seed, epoch, size)[place])


def weighted(seed: int, index: int, cumulative: np.ndarray) -> int:
    """Returns the row of draw `index` by weight, from the running sum of weights."""
    point = np.random.default_rng([seed, index]).random() * cumulative[-1]
    return min(int(np.searchsorted(cumulative, point, side="right")), len(cumulative) - 1)


@lru_cache(maxsize=64)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
