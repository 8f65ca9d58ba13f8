"""What an algorithm is: which forward passes it needs, how rewards become advantages, and the loss of one token.

How token losses add up is not part of the loss: `loss_weights` gives every token its share of the minibatch's total, so
the loss is a weighted sum whose value and gradient are the same however the minibatch is split into micro-batches,
packed, or spread over workers.

A step calls, in this order,

    prepare      once, before any forward pass: what is trained, what is scored
    advantages   once, when every column that `needs` names is there; `returns` too where there is a critic
    loss_weights for each minibatch
    loss         on the workers, for each micro-batch; `value_loss` on the critic's
    observe      once, with the step's metrics
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rollcli.algorithms import aggregation
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group

if TYPE_CHECKING:
    from torch import Tensor

    from rollcli.config.schema import Problems, RlRecipe

METRIC_MAX = "_max"
"""A token metric whose name ends so is reduced by its maximum; all others by their mean over trained tokens."""


@dataclass
class TrainedTokens:
    """Columns at the N positions that are trained, as tensors `[N]`; `logprobs` and `logits` carry a gradient.

    `rows` says which trajectory of the micro-batch a token belongs to; a trajectory is never split over two. `logits`
    and `reference_distribution` (log-probabilities) are `[N, V]`, of the distribution at the sampling temperature.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    reference_logprobs: Tensor | None = None
    rows: Tensor | None = None
    logits: Tensor | None = None
    reference_distribution: Tensor | None = None


@dataclass
class ValueTokens:
    """The critic's columns at the N positions that are trained, `[N]`; `values` carries a gradient."""

    values: Tensor
    old_values: Tensor
    returns: Tensor


@dataclass
class Algorithm:
    """Options and mathematics of one algorithm; subclasses add fields."""

    group_relative: ClassVar[bool] = False
    """True when advantages compare the answers of a group, which then needs at least two."""
    demonstrations: ClassVar[bool] = False
    """True when it learns from demonstrations instead of rewards: for `pipeline: sft`, and only for it."""
    greedy_baseline: ClassVar[bool] = False
    """True when each group is to have one more, greedy answer, whose reward is the column `greedy_reward`."""
    name: ClassVar[str] = ""

    def needs(self) -> frozenset[str]:
        """Returns the forward passes whose columns its advantages or its loss use (`FORWARD_PASSES`, config/schema.py).

        The old policy's log-probabilities are there for the loss in any case; `old` says that advantages use them too.
        """
        return frozenset()

    @property
    def old_from_rollout(self) -> bool:
        """Whether the rollout engine's log-probabilities stand for the old policy's."""
        return False

    def compares_group(self) -> bool:
        """Returns whether, as it is set, advantages compare the answers of a group."""
        return self.group_relative

    def recipe_problems(self, recipe: RlRecipe) -> Problems:
        """Yields `(key of the recipe, message)` for what does not go with the rest of the recipe."""
        yield from ()

    def keep_group(self, group: Group) -> bool:
        """Returns whether a finished group is worth training on."""
        return True

    def prepare(self, batch: Batch) -> None:
        """Takes tokens off the loss mask and adds columns of its own; state that moves with each step moves here."""

    def advantages(self, batch: Batch) -> np.ndarray:
        """Returns float32 `[T]`, the advantage of each token; 0 where the loss mask is False."""
        raise NotImplementedError

    def returns(self, batch: Batch) -> np.ndarray:
        """Returns float32 `[T]`, what the critic is to predict at each token."""
        raise NotImplementedError

    def loss_weights(self, batch: Batch) -> np.ndarray:
        """Returns float32 `[T]`, the share of each token's loss in the minibatch's loss; 0 off the loss mask."""
        return aggregation.token_mean(batch)

    def loss(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each trained token `[N]`, and metrics `[N]`."""
        raise NotImplementedError

    def value_loss(self, tokens: ValueTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the critic's loss at each trained token `[N]`, and metrics `[N]`."""
        raise NotImplementedError

    def observe(self, metrics: Mapping[str, float], samples: int) -> None:
        """Learns what a step measured, and on how many samples."""

    def state(self) -> dict[str, Any]:
        """Returns what changes during a run, as plain numbers: checkpoints keep it, workers are told it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
