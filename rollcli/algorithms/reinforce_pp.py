"""REINFORCE++ (arXiv 2501.03262, §3): PPO without a critic, its baseline the whole batch.

    A_t = Σ_{t'≥t} (r_t' - β k1_t'),   then mean 0 and standard deviation 1 over all tokens of the batch

with the reward at the last token, KL taken off token by token, and PPO's clipped ratio.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollcli.algorithms.advantages import discounted_returns
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Clipped
from rollcli.algorithms.turns import token_rewards
from rollcli.data.batch import Batch


@dataclass
class ReinforcePp(Clipped):
    """Returns of tokens, whitened over the batch."""

    kl: KlPenalty = field(default_factory=lambda: KlPenalty(coefficient=0.01, estimator="k1", place="reward"))
    """Penalty for leaving the reference model."""
    whiten: bool = True
    """Give the advantages of all trained tokens of a step mean 0 and standard deviation 1."""

    def estimate(self, batch: Batch, scores: np.ndarray, kl_rewards: np.ndarray) -> np.ndarray:
        """Returns each token's undiscounted return."""
        return discounted_returns(batch, token_rewards(batch, scores) + kl_rewards, gamma=1.0)
