"""PPO: Proximal Policy Optimization (arXiv 1707.06347), for language models as in InstructGPT (arXiv 2203.02155).

    J = mean_t min(ρ_t A_t, clip(ρ_t, 1-ε, 1+ε) A_t),     A_t = Σ_l (γλ)^l δ_{t+l},     δ_t = r_t + γ V_{t+1} - V_t

A token is an action. The reward comes at the last one, less β log π_old/π_ref at each (γ = 1, λ = 0.95, β = 0.02).
Advantages are whitened over the batch. The critic learns A_t + V_t with a loss clipped around its old values,

    L = mean_t 1/2 max((V - R)², (clip(V, V_old - ε_v, V_old + ε_v) - R)²).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollcli.algorithms.advantages import generalized_advantages
from rollcli.algorithms.base import ValueTokens
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Clipped
from rollcli.algorithms.turns import token_rewards
from rollcli.config.schema import Problems, in_unit_interval, positive
from rollcli.data.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Ppo(Clipped):
    """A critic's advantages under a clipped ratio."""

    kl: KlPenalty = field(default_factory=lambda: KlPenalty(coefficient=0.02, estimator="k1", place="reward"))
    """Penalty for leaving the reference model."""
    whiten: bool = True
    """Give the advantages of all trained tokens of a step mean 0 and standard deviation 1."""
    gamma: float = 1.0
    """Discount from one token to the next."""
    lam: float = 0.95
    """λ of generalized advantage estimation: 0 trusts the critic alone, 1 the returns alone."""
    value_clip: float | None = 0.2
    """The critic's loss sees no gain beyond this distance from its old value; null does not clip."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        yield from positive(self, "value_clip")
        yield from in_unit_interval(self, "gamma", "lam")

    def needs(self) -> frozenset[str]:
        """A critic, and what the KL penalty needs."""
        return super().needs() | {"critic"}

    def estimate(self, batch: Batch, scores: np.ndarray, kl_rewards: np.ndarray) -> np.ndarray:
        """Returns generalized advantages."""
        rewards = token_rewards(batch, scores) + kl_rewards
        return generalized_advantages(batch, rewards, batch.tokens["values"], self.gamma, self.lam)

    def returns(self, batch: Batch) -> np.ndarray:
        """Returns advantages before whitening, plus values."""
        advantages = self.estimate(batch, batch.samples["score"], self.kl.rewards(batch))
        mask = batch.tokens["loss_mask"]
        return np.where(mask, advantages + np.where(mask, batch.tokens["values"], 0.0), 0.0).astype(np.float32)

    def value_loss(self, tokens: ValueTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the clipped squared error at each token."""
        loss = (tokens.values - tokens.returns).square()
        metrics = {"value_mean": tokens.values.detach(), "return_mean": tokens.returns}
        if self.value_clip is not None:
            moved = (tokens.values - tokens.old_values).clamp(-self.value_clip, self.value_clip)
            bounded = (tokens.old_values + moved - tokens.returns).square()
            metrics["value_clip_share"] = (bounded > loss).to(loss.dtype)
            loss = loss.maximum(bounded)
        return loss / 2, metrics
