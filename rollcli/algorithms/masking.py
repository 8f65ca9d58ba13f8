"""Which sampled tokens are trained, and how much each trajectory counts.

A masked token is as if it had not been sampled: it takes part in no forward pass's loss and in no denominator. Its
trajectory still counts in its group's baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollcli.config.schema import Problems, finite, in_unit_interval, not_negative, positive
from rollcli.data.batch import Batch


@dataclass
class Masking:
    """Samples and tokens that are left out of the update, and weights of the others."""

    truncated: bool = False
    """Leave out answers that were cut off by their budget (DAPO's overlong filtering)."""
    turns: Literal["all", "last"] = "all"
    """Which of the model's turns are trained."""
    min_tokens: int | None = None
    """Leave out shorter answers."""
    max_tokens: int | None = None
    """Leave out longer answers."""
    min_accuracy: float | None = None
    """Leave out groups whose mean accuracy is lower: too hard to learn from."""
    max_accuracy: float | None = None
    """Leave out groups whose mean accuracy is higher: too easy."""
    difficulty_weight: float = 0.0
    """Weigh a sample by `(1 - mean accuracy of its group)` to this power; 0 weighs all alike."""
    length_weight: float = 0.0
    """Weigh a sample by `(mean length / its length)` to this power; 0 weighs all alike."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from positive(self, "min_tokens", "max_tokens")
        yield from not_negative(self, "difficulty_weight")
        yield from in_unit_interval(self, "min_accuracy", "max_accuracy")
        yield from finite(self, "length_weight")
        for low, high in (("min_tokens", "max_tokens"), ("min_accuracy", "max_accuracy")):
            bounds = getattr(self, low), getattr(self, high)
            if None not in bounds and bounds[0] > bounds[1]:
                yield low, f"is {bounds[0]}, above `{high}`, {bounds[1]}: nothing would be trained"

    def mask(self, batch: Batch) -> np.ndarray:
        """Returns which tokens are trained, bool `[T]`, a part of the loss mask."""
        keep = np.ones(len(batch), dtype=bool)
        if self.truncated:
            keep &= ~batch.samples["truncated"]
        lengths = batch.samples["sampled"]
        keep &= (lengths >= (self.min_tokens or 0)) & (lengths <= (self.max_tokens or np.inf))
        if self.min_accuracy is not None or self.max_accuracy is not None:
            accuracy = batch.group_means("accuracy")
            keep &= (accuracy >= (self.min_accuracy or 0)) & (
                accuracy <= (1 if self.max_accuracy is None else self.max_accuracy)
            )
        mask = batch.tokens["loss_mask"] & keep[batch.rows]
        if self.turns == "last":
            last, sampled = np.full(len(batch), -1), batch.tokens["loss_mask"]
            np.maximum.at(last, batch.rows[sampled], batch.tokens["turns"][sampled])
            mask &= batch.tokens["turns"] == last[batch.rows]
        return mask

    def weights(self, batch: Batch) -> np.ndarray:
        """Returns the factor of each trajectory's losses, float64 `[B]`."""
        weights = np.ones(len(batch))
        if self.difficulty_weight:
            weights *= (1 - batch.group_means("accuracy").clip(0, 1)) ** self.difficulty_weight
        if self.length_weight and len(batch):
            lengths = np.maximum(batch.samples["sampled"], 1)
            weights *= (lengths.mean() / lengths) ** self.length_weight
        return weights
