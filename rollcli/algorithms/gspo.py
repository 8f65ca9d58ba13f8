"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071, eq. 5).

    J = 1/G Σ_i min(s_i A_i, clip(s_i, 1-ε, 1+ε) A_i),        s_i = (π(o_i) / π_old(o_i))^(1/|o_i|)

with GRPO's advantages. A whole answer is clipped or not, so the bounds are a hundred times tighter than those of a
token; the defaults are the paper's. The ratio has the form of GSPO-token (eq. 14), equal where an answer's tokens share
one advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rollcli.algorithms import surrogates
from rollcli.algorithms.base import TrainedTokens
from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Gspo(Grpo):
    """GRPO with one ratio for a whole answer."""

    aggregation: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"
    """How token losses add up: an answer counts once, whatever its length."""
    kl: KlPenalty = field(default_factory=KlPenalty)
    """Penalty for leaving the reference model."""
    clip_low: float = 3e-4
    """The ratio's gain stops below 1 minus this."""
    clip_high: float = 4e-4
    """The ratio's gain stops above 1 plus this."""

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Clips each answer's ratio."""
        ratio = surrogates.sequence_ratio(tokens.logprobs, tokens.old_logprobs, tokens.rows)
        loss, active = surrogates.dual_clipped(ratio, tokens.advantages, self.clip_low, self.clip_high, self.dual_clip)
        return loss, {"clip_share": active}
