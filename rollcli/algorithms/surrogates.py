"""Policy-gradient surrogates per token. Tensors in, tensors out; the caller aggregates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Returns the clipped surrogate loss `[N]` and where clipping is active `[N]` (PPO, arXiv 1707.06347, eq. 7).

    Args:
        ratio: new over old probability of each token, `[N]`.
        advantages: `[N]`.
        clip_low: the ratio is kept above `1 - clip_low`.
        clip_high: the ratio is kept below `1 + clip_high`.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -plain.minimum(bounded), (bounded < plain).to(ratio.dtype)
