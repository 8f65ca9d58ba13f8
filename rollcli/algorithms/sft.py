"""Supervised fine-tuning as an algorithm: the loss of a demonstrated token is its negative log-probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rollcli.algorithms.base import Algorithm, TrainedTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Sft(Algorithm):
    """Token-mean cross-entropy on demonstrations."""

    demonstrations: ClassVar[bool] = True

    def loss(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the cross-entropy of each token."""
        return -tokens.logprobs, {}
