"""TOPR: Tapered Off-Policy REINFORCE (arXiv 2503.14286, eq. 7).

    ∇J = Σ_{A>0} A ∇log π(o)  +  Σ_{A≤0} clip(π(o)/μ(o), 0, 1) A ∇log π(o)

Good answers are imitated whoever gave them; bad ones are pushed away only as long as the policy still gives them, so
learning is stable far off-policy. μ is the policy that sampled: `correction.old_logprobs` is `rollout`. The paper's
rewards are 1 and -1; `baseline` makes such of 0 and 1, at half the size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollcli.algorithms import surrogates
from rollcli.algorithms.base import TrainedTokens
from rollcli.algorithms.correction import Correction
from rollcli.algorithms.policy_gradient import Unclipped
from rollcli.config.schema import Problems, finite
from rollcli.data.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Topr(Unclipped):
    """Importance weights for bad answers only, at most 1."""

    correction: Correction = field(default_factory=lambda: Correction(old_logprobs="rollout"))
    """What is done about the gap between rollout engine and trainer; here the taper spans it."""
    baseline: float = 0.5
    """Subtracted from every score; it sets what counts as a bad answer."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        yield from finite(self, "baseline")

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns the score above the baseline."""
        return scores - self.baseline

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Tapers whole answers."""
        difference = tokens.logprobs.detach() - tokens.old_logprobs
        ratio = surrogates.row_sums(difference, tokens.rows).clamp(max=0.0).exp()
        weights = ratio.where(tokens.advantages <= 0, ratio.new_ones(()))
        return surrogates.weighted_logprob(tokens.logprobs, weights, tokens.advantages), {"taper": weights}
