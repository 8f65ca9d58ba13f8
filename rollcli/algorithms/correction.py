"""Rollout correction: importance weights for the gap between the policy that sampled and the one that is trained.

The rollout engine computes slightly other numbers than the trainer, and in asynchronous runs samples with older
weights. The weight of a token is the trainer's probability before the step's first update over the engine's,

    token       w_t = π_old(t) / μ(t)                  sequence    w = Π_t w_t        geometric   w = (Π_t w_t)^(1/n)

either cut at a bound (truncated importance sampling) or set to 0 outside of bounds (masked importance sampling; with
two bounds on tokens, IcePop). With the clipped ratio π/π_old this is decoupled PPO (AReaL, arXiv 2505.24298, eq. 5),
whose proximal policy is π_old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollcli.algorithms.surrogates import LOG_RATIO_LIMIT, row_means, row_sums
from rollcli.config.schema import Problems, not_negative, positive

if TYPE_CHECKING:
    from torch import Tensor

    from rollcli.algorithms.base import TrainedTokens

LEVELS = {"token": lambda difference, rows: difference, "sequence": row_sums, "geometric": row_means}


@dataclass
class Correction:
    """What is done about the gap between rollout engine and trainer; it is measured in any case."""

    mode: Literal["none", "truncate", "mask"] = "none"
    """`truncate` cuts weights at `high`; `mask` keeps those between `low` and `high` and drops the other tokens."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whether a token, the product over a sequence, or its geometric mean is weighed."""
    low: float = 0.0
    """Smallest weight kept by `mask`; 0.5 with `high: 5` on tokens is IcePop."""
    high: float = 2.0
    """Largest weight."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Whose log-probabilities are the old policy's: the trainer's own, or those the rollout engine reported, which
    saves a forward pass; the algorithm's ratio then spans both the gap and the update."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from not_negative(self, "low")
        yield from positive(self, "high")
        if self.high <= self.low:
            yield "high", f"must be above `low`, {self.low}, is {self.high}"
        if self.mode == "truncate" and self.low > 0:
            yield "low", "`truncate` has no lower bound; `mask` has"
        if self.mode != "none" and self.old_logprobs == "rollout":
            yield "mode", "with `old_logprobs: rollout` every weight is 1: the ratio itself spans the gap"

    def log_ratios(self, difference: Any, rows: Any) -> Any:
        """Returns log w at each token `[N]` from `old - rollout` log-probabilities; arrays or tensors."""
        return LEVELS[self.level](difference, rows)

    def weights(self, tokens: TrainedTokens) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Returns the factor of each token's loss `[N]`, without a gradient, and metrics."""
        if self.mode == "none":
            return 1.0, {}
        difference = (tokens.old_logprobs - tokens.rollout_logprobs).detach()
        ratio = self.log_ratios(difference, tokens.rows).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        outside = (ratio > self.high) | (ratio < self.low)
        weights = ratio.clamp(max=self.high) if self.mode == "truncate" else ratio * ~outside
        return weights, {"correction_weight": weights, "correction_clipped": outside.to(ratio.dtype)}

    def outside(self, difference: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns where the bounds would cut, bool `[N]`, from float64 `old - rollout`; measured whatever `mode`."""
        ratio = np.exp(np.clip(self.log_ratios(difference, rows), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        return (ratio > self.high) | (ratio < self.low)
