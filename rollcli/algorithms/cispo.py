"""CISPO: clipped importance weights (MiniMax-M1, arXiv 2506.13585, eq. 4).

    J = 1/Σ|o_i| Σ_i Σ_t sg(clip(ρ_it, w_min, w_max)) A_i log π(o_it)

with GRPO's advantages. The weight is clipped, not the update: no token loses its gradient. The bounds are absolute
weights, not distances from 1; the paper tunes only the upper one and has no KL penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollcli.algorithms import surrogates
from rollcli.algorithms.base import TrainedTokens
from rollcli.algorithms.policy_gradient import GroupNormalized
from rollcli.config.schema import Problems, not_negative, positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Cispo(GroupNormalized):
    """Every token keeps its gradient, under a bounded weight."""

    weight_min: float = 0.0
    """Smallest importance weight."""
    weight_max: float = 5.0
    """Largest importance weight."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        yield from not_negative(self, "weight_min")
        yield from positive(self, "weight_max")
        if self.weight_max < self.weight_min:
            yield "weight_max", f"is {self.weight_max}, below `weight_min`, {self.weight_min}"

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighs log-probabilities."""
        ratio = surrogates.ratio(tokens.logprobs, tokens.old_logprobs).detach()
        weights = ratio.clamp(self.weight_min, self.weight_max)
        loss = surrogates.weighted_logprob(tokens.logprobs, weights, tokens.advantages)
        return loss, {"clip_share": (weights != ratio).to(ratio.dtype)}
