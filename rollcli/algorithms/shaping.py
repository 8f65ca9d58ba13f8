"""Reward shaping: from the reward a trajectory earned to the score its advantage is computed from.

In this order: a length reward is added, an overlong penalty taken off, the sum clipped, then normalized. Accuracy, and
with it dynamic sampling, never sees any of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rollcli.algorithms.advantages import EQUAL, per_group, spread
from rollcli.config.schema import Problems, not_negative, positive
from rollcli.data.batch import Batch

Over = Literal["none", "batch", "group", "running"]


def overlong_penalty(lengths: np.ndarray, limits: np.ndarray, buffer: float) -> np.ndarray:
    """Returns 0 up to `limit - buffer` tokens, falling to -1 at `limit`, `[B]` (DAPO, arXiv 2503.14476, eq. 13)."""
    return np.clip((limits - buffer - lengths) / buffer, -1.0, 0.0)


def length_reward(lengths: np.ndarray, groups: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns a reward for shortness within a group, `[B]` (Kimi k1.5, arXiv 2501.12599, §2.3.3).

    From 0.5 for the shortest answer to -0.5 for the longest; a wrong answer gains nothing by being short.
    """

    def estimate(length: np.ndarray, correct: np.ndarray) -> np.ndarray:
        reward = 0.5 - (length - length.min()) / np.ptp(length)
        return np.where(correct, reward, np.minimum(reward, 0.0))

    return per_group(lengths, groups, estimate, right)


@dataclass
class RunningMoments:
    """Mean and variance of everything seen so far (parallel update of Chan et al.)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Takes in a step's values `[n]`."""
        if not len(values):
            return
        count = self.count + len(values)
        delta = float(values.mean()) - self.mean
        self.squares += float(((values - values.mean()) ** 2).sum()) + delta**2 * self.count * len(values) / count
        self.mean += delta * len(values) / count
        self.count = count

    @property
    def std(self) -> float:
        """Standard deviation with Bessel's correction, or 1 where there is none."""
        std = (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0
        return std if std >= EQUAL else 1.0


@dataclass
class Shaping:
    """What is done to rewards before advantages."""

    clip: list[float] | None = None
    """Lowest and highest reward, such as `[-10, 10]`; null clips nothing."""
    mean: Over = "none"
    """Subtract the mean over the batch, the group, or all samples so far."""
    std: Over = "none"
    """Divide by the standard deviation over the batch, the group, or all samples so far."""
    overlong_buffer: float | None = None
    """Tokens before the end of the budget over which a penalty grows to `overlong_penalty` (DAPO); below 1, a share of
    the budget; null penalizes nothing."""
    overlong_penalty: float = 1.0
    """What an answer loses that uses its whole budget."""
    length_reward: float = 0.0
    """Weight of a reward for being shorter than the group's other answers (Kimi k1.5); 0 is none."""

    _running: RunningMoments = field(default_factory=RunningMoments, init=False, repr=False, compare=False)

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from positive(self, "overlong_buffer")
        yield from not_negative(self, "overlong_penalty", "length_reward")
        if self.clip is not None and (len(self.clip) != 2 or self.clip[0] >= self.clip[1]):
            yield "clip", f"must be two numbers, the lower first, is {self.clip}"

    def __call__(self, batch: Batch) -> np.ndarray:
        """Returns the score of each trajectory, float64 `[B]`. A step calls it once: running statistics move."""
        scores = batch.samples["reward"].astype(np.float64)
        groups, lengths = batch.samples["group"], batch.samples["sampled"].astype(np.float64)
        if self.length_reward:
            scores = scores + self.length_reward * length_reward(lengths, groups, batch.samples["accuracy"] > 0.5)
        if self.overlong_buffer is not None:
            budget = batch.samples["budget"].astype(np.float64)
            buffer = self.overlong_buffer * budget if self.overlong_buffer < 1 else self.overlong_buffer
            scores = scores + self.overlong_penalty * overlong_penalty(lengths, budget, buffer)
        if self.clip is not None:
            scores = scores.clip(*self.clip)
        return self._normalized(scores, groups)

    def _normalized(self, scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
        if "running" in (self.mean, self.std):
            self._running.add(scores)
        means: dict[str, Callable[[], Any]] = {
            "none": lambda: 0.0,
            "batch": lambda: scores.mean() if len(scores) else 0.0,
            "group": lambda: _by_group(scores, groups, np.mean),
            "running": lambda: self._running.mean,
        }
        stds: dict[str, Callable[[], Any]] = {
            "none": lambda: 1.0,
            "batch": lambda: spread(scores),
            "group": lambda: _by_group(scores, groups, spread),
            "running": lambda: self._running.std,
        }
        centered = scores - means[self.mean]()
        # The mean of equal numbers may differ from them by a rounding error, which is not a reward.
        centered[np.abs(centered) < EQUAL] = 0.0
        return centered / stds[self.std]()

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return vars(self._running).copy()

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from a state."""
        self._running = RunningMoments(**state)


def _by_group(values: np.ndarray, groups: np.ndarray, summary: Callable[[np.ndarray], Any]) -> np.ndarray:
    _, places = np.unique(groups, return_inverse=True)
    return np.array([summary(values[places == place]) for place in range(places.max(initial=-1) + 1)])[places]
