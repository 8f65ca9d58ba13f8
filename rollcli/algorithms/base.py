"""What an algorithm is: which forward passes it needs, how rewards become advantages, and the loss of one token.

How token losses add up is not part of the loss: `loss_weights` gives every token its share of the minibatch's total, so
the loss is a weighted sum whose value and gradient are the same however the minibatch is split into micro-batches,
packed, or spread over workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollcli.algorithms import aggregation
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group

if TYPE_CHECKING:
    from torch import Tensor

METRIC_MAX = "_max"
"""A token metric whose name ends so is reduced by its maximum; all others by their mean over trained tokens."""


@dataclass
class TrainedTokens:
    """Columns at the N positions that are trained, as tensors `[N]`; `logprobs` alone carries a gradient.

    `rows` says which trajectory of the micro-batch a token belongs to; a trajectory is never split over two.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    reference_logprobs: Tensor | None = None
    rows: Tensor | None = None


@dataclass
class Algorithm:
    """Options and mathematics of one algorithm; subclasses add fields."""

    group_relative: ClassVar[bool] = False
    """True when advantages compare the answers of a group, which then needs at least two."""
    demonstrations: ClassVar[bool] = False
    """True when it learns from demonstrations instead of rewards: for `pipeline: sft`, and only for it."""
    name: ClassVar[str] = ""

    def needs(self) -> frozenset[str]:
        """Returns the extra forward passes it uses: any of `FORWARD_PASSES` (config/schema.py).

        `old` is the policy's own pass before the step's first update; the first minibatch never needs it.
        """
        return frozenset({"old"})

    def keep_group(self, group: Group) -> bool:
        """Returns whether a finished group is worth training on."""
        return True

    def advantages(self, batch: Batch) -> np.ndarray:
        """Returns float32 `[T]`, the advantage of each token; 0 where the loss mask is False."""
        raise NotImplementedError

    def loss_weights(self, batch: Batch) -> np.ndarray:
        """Returns float32 `[T]`, the share of each token's loss in the minibatch's loss; 0 off the loss mask."""
        return aggregation.token_mean(batch)

    def loss(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each trained token `[N]`, and metrics `[N]`."""
        raise NotImplementedError
