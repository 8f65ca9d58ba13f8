"""What a training engine computes from a model's outputs: log-probabilities, distributions, values, and their losses.

An engine brings a model's outputs `[N, K]` to the N trained tokens, each from the position that predicts it: logits
over K = V tokens for a language model, K = 1 value for a critic. An objective makes of them a token column, or a loss.
So engines know no algorithm, and an algorithm knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from rollcli.algorithms.base import Algorithm, TrainedTokens, ValueTokens
from rollcli.algorithms.entropy import entropy
from rollcli.algorithms.surrogates import LOG_RATIO_LIMIT

ENTROPY_ROWS = 1024
"""Positions whose distribution is held in memory at once; over a large vocabulary all of them would not fit."""


@dataclass(frozen=True)
class TokenColumns:
    """The batch's columns at the N trained tokens of one micro-batch.

    Attributes:
        column: returns a token column as a tensor `[N]` or `[N, V]`, or None where the batch has none of that name.
        rows: int64 `[N]`, which trajectory a token belongs to.
        ids: int64 `[N]`, the tokens themselves.
    """

    column: Callable[[str], torch.Tensor | None]
    rows: torch.Tensor
    ids: torch.Tensor


Losses = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]
"""Loss of each token `[N]`, metrics `[N]`, and the column `[N]` that the pass made."""


class Objective(Protocol):
    """What outputs are turned into."""

    def column(self, tokens: TokenColumns, outputs: torch.Tensor) -> torch.Tensor:
        """Returns what a forward pass is for, `[N]` or `[N, V]`, from float32 outputs `[N, K]`."""

    def loss(self, tokens: TokenColumns, outputs: torch.Tensor) -> Losses:
        """Returns what an update needs, from outputs `[N, K]` with a gradient."""


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of the tokens under the sampling temperature, and the algorithm's loss on them."""

    temperature: float
    algorithm: Algorithm | None = None

    def column(self, tokens: TokenColumns, outputs: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities."""
        return -F.cross_entropy(outputs / self.temperature, tokens.ids, reduction="none")

    def loss(self, tokens: TokenColumns, outputs: torch.Tensor) -> Losses:
        """Returns the algorithm's loss; without a column `old_logprobs` the old policy is this one."""
        logits = outputs / self.temperature
        logprobs = -F.cross_entropy(logits, tokens.ids, reduction="none")
        old = _or(tokens.column("old_logprobs"), logprobs.detach())
        trained = TrainedTokens(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=_or(tokens.column("rollout_logprobs"), old),
            advantages=_or(tokens.column("advantages"), torch.ones_like(old)),
            reference_logprobs=tokens.column("reference_logprobs"),
            rows=tokens.rows,
            logits=logits,
            reference_distribution=tokens.column("reference_distribution"),
        )
        losses, metrics = self.algorithm.loss(trained)
        with torch.no_grad():
            difference = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            # An estimate by k3 of KL(old ‖ new): how far updates have led so far, the gap to the rollout engine
            # included where its log-probabilities stand for the old ones.
            metrics["kl_old"] = difference.exp() - 1 - difference
            metrics["entropy"] = torch.cat([entropy(part) for part in logits.detach().split(ENTROPY_ROWS)])
        return losses, metrics, logprobs.detach()


@dataclass(frozen=True)
class Distribution:
    """Log-probabilities of the whole vocabulary under the sampling temperature; for a forward pass only."""

    temperature: float

    def column(self, tokens: TokenColumns, outputs: torch.Tensor) -> torch.Tensor:
        """Returns `[N, V]`."""
        return (outputs / self.temperature).log_softmax(-1)

    def loss(self, tokens: TokenColumns, outputs: torch.Tensor) -> Losses:
        """Has none."""
        raise NotImplementedError


@dataclass(frozen=True)
class Values:
    """The critic's value of the state each token was sampled in, and the algorithm's loss on it."""

    algorithm: Algorithm | None = None

    def column(self, tokens: TokenColumns, outputs: torch.Tensor) -> torch.Tensor:
        """Returns values."""
        return outputs[:, 0]

    def loss(self, tokens: TokenColumns, outputs: torch.Tensor) -> Losses:
        """Returns the algorithm's loss against the columns `returns` and `values`."""
        values = outputs[:, 0]
        losses, metrics = self.algorithm.value_loss(
            ValueTokens(values, old_values=tokens.column("values"), returns=tokens.column("returns"))
        )
        return losses, metrics, values.detach()


def _or(column: torch.Tensor | None, otherwise: torch.Tensor) -> torch.Tensor:
    return otherwise if column is None else column
