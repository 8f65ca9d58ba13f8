"""Policy-gradient surrogates per token. Tensors in, tensors out `[N]`; the caller aggregates.

Each returns the loss, and where clipping is active as 0 or 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are kept within this, or one impossible token makes the whole loss infinite."""


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Returns the new over the old probability of each token."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def row_sums(values: Any, rows: Any) -> Any:
    """Returns the sum over each trajectory, at each of its tokens: `[N]` from `[N]`, tensors or arrays."""
    count = int(rows.max()) + 1 if len(rows) else 0
    if isinstance(values, np.ndarray):
        return np.bincount(rows, weights=values, minlength=count)[rows]
    return values.new_zeros(count).index_add(0, rows, values)[rows]


def row_means(values: Any, rows: Any) -> Any:
    """Returns the mean over each trajectory, at each of its tokens: `[N]` from `[N]`, tensors or arrays."""
    ones = np.ones(len(values)) if isinstance(values, np.ndarray) else values.new_ones(len(values))
    return row_sums(values, rows) / row_sums(ones, rows)


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The clipped surrogate (PPO, arXiv 1707.06347, eq. 7).

    Args:
        ratio: new over old probability of each token, `[N]`.
        advantages: `[N]`.
        clip_low: the ratio is kept above `1 - clip_low`.
        clip_high: the ratio is kept below `1 + clip_high`.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -plain.minimum(bounded), (bounded < plain).to(ratio.dtype)


def dual_clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, bound: float | None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, its loss on a bad token at most `bound` × |A| (dual clip, arXiv 1912.09729, eq. 5).

    Without it a token that has become far more probable, and is bad, gives a loss without limit.
    """
    loss, active = clipped(ratio, advantages, clip_low, clip_high)
    if bound is None:
        return loss, active
    limit = -bound * advantages
    over = (advantages < 0) & (loss > limit)
    return loss.where(~over, limit), active.where(~over, over.to(active.dtype))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, rows: Tensor) -> Tensor:
    """Returns each trajectory's ratio, the geometric mean of its tokens', at each of its tokens.

    Its value is the trajectory's, its gradient the token's own (GSPO-token, arXiv 2507.18071, eq. 14): with one
    advantage for all tokens of a trajectory that is the gradient of the trajectory's ratio.
    """
    mean = row_means(logprobs.detach() - old_logprobs, rows)
    value = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return value * (logprobs - logprobs.detach()).exp()


def weighted_logprob(logprobs: Tensor, weights: Tensor, advantages: Tensor) -> Tensor:
    """Returns `-weight × A × log π`, the weight without a gradient: REINFORCE under a chosen importance weight."""
    return -weights.detach() * advantages * logprobs


def soft_gate(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """Returns `-4/τ σ(τ (ρ - 1)) A`, a gate whose slope is 1 at ratio 1 and fades away from it (SAPO, 2511.20347)."""
    tau = (advantages > 0).to(ratio.dtype) * (tau_positive - tau_negative) + tau_negative
    return -(tau * (ratio - 1)).sigmoid() * 4 / tau * advantages
