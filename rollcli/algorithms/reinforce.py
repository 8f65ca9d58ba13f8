"""REINFORCE (Williams, 1992), for an answer, a turn, or a token as the action that earns a return.

    ∇J = Σ_t A_t ∇log π(a_t)

`returns_of: trajectory` gives every token the episode's reward; `turn` the rewards of its own and, discounted turn by
turn, later turns (multi-turn REINFORCE); `token` does so token by token. A baseline is a matter of shaping:
`shaping.mean` is `batch`, `group` or `running`, and `shaping.std` likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollcli.algorithms import turns
from rollcli.algorithms.advantages import discounted_returns
from rollcli.algorithms.policy_gradient import Unclipped
from rollcli.config.schema import Problems, in_unit_interval
from rollcli.data.batch import Batch


@dataclass
class Reinforce(Unclipped):
    """Policy gradient on returns as they are."""

    returns_of: Literal["trajectory", "turn", "token"] = "trajectory"
    """What a return is counted for."""
    gamma: float = 1.0
    """Discount from one turn, or token, to the next."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        yield from in_unit_interval(self, "gamma")
        if self.returns_of == "trajectory" and self.gamma != 1:
            yield "gamma", f"is {self.gamma}, but with `returns_of: trajectory` nothing is discounted"

    def estimate(self, batch: Batch, scores: np.ndarray, kl_rewards: np.ndarray) -> np.ndarray:
        """Returns what follows each action."""
        if self.returns_of == "trajectory":
            return super().estimate(batch, scores, kl_rewards)
        rewards = turns.token_rewards(batch, scores) + kl_rewards
        if self.returns_of == "token":
            return discounted_returns(batch, rewards, self.gamma)
        return turns.at_tokens(batch, *turns.turn_returns(batch, rewards, self.gamma))
