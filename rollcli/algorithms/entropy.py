"""Entropy of next-token distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy in nats at each token, `[N]` from `[N, V]` logits, divided by the temperature."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
