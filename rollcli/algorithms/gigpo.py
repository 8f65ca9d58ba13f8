"""GiGPO: Group-in-Group Policy Optimization for agents (arXiv 2505.10978, eq. 8).

    A_it = A^E_i + ω A^S_it

A^E is the episode's total reward relative to its group, as in GRPO; A^S the turn's discounted return relative to the
turns that any episode of the same group took in the same state. So a turn gets credit of its own without a critic.
Which states are equal, the environment says, or else what the model last observed. The defaults are the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollcli.algorithms import turns
from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Aggregation
from rollcli.config.schema import Problems, in_unit_interval, not_negative
from rollcli.data.batch import Batch


@dataclass
class GiGpo(Grpo):
    """GRPO for episodes, and within it for turns from equal states."""

    aggregation: Aggregation = "token-mean"
    """How token losses add up."""
    kl: KlPenalty = field(default_factory=lambda: KlPenalty(coefficient=0.01))
    """Penalty for leaving the reference model."""
    gamma: float = 0.95
    """Discount from one turn to the next."""
    step_weight: float = 1.0
    """Weight ω of the turn's advantage."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        yield from not_negative(self, "step_weight")
        yield from in_unit_interval(self, "gamma")

    def estimate(self, batch: Batch, scores: np.ndarray, kl_rewards: np.ndarray) -> np.ndarray:
        """Adds the advantages of episode and turn."""
        episode = super().estimate(batch, scores, kl_rewards)
        rewards = turns.token_rewards(batch, scores) + kl_rewards
        returns, rows, numbers = turns.turn_returns(batch, rewards, self.gamma)
        relative = turns.state_advantages(batch, returns, rows, numbers, self.scale)
        return episode + self.step_weight * turns.at_tokens(batch, relative, rows, numbers)
