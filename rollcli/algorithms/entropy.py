"""Entropy of next-token distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


IMPOSSIBLE = -1e30
"""Stands for the log-probability of a word that cannot be said."""


def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy in nats at each token, `[N]` from `[N, V]` logits, divided by the temperature."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs.clamp(min=IMPOSSIBLE)).sum(-1)
