"""The policy optimization of Kimi k1.5: online mirror descent (arXiv 2501.12599, eq. 3).

    ∇J = 1/G Σ_i [ (r_i - mean r) ∇log π(o_i)  -  τ/2 ∇ (log π(o_i)/π_old(o_i))² ]

The square keeps the policy near the one that sampled; nothing is clipped. It has no gradient at a rollout's first
update, so it works only with several: `minibatches` or `epochs`. `shaping.length_reward` is the paper's reward
for shorter answers, which it phases in late. It leaves τ open; here it is 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollcli.algorithms import surrogates
from rollcli.algorithms.base import TrainedTokens
from rollcli.algorithms.policy_gradient import GroupNormalized
from rollcli.config.schema import Problems, not_negative

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class KimiK15(GroupNormalized):
    """REINFORCE with the group's mean, and a square that holds answers where they were."""

    aggregation: Literal["seq-mean-token-sum", "seq-mean-token-sum-norm"] = "seq-mean-token-sum"
    """How token losses add up: an answer's log-probability is that of the whole."""
    scale: Literal["none"] = "none"
    """Advantages are rewards against the group's mean, not divided."""
    tau: float = 0.1
    """Weight of the square."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        yield from not_negative(self, "tau")

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Gives every token an equal part of its answer's square."""
        difference = tokens.logprobs - tokens.old_logprobs
        square = surrogates.row_sums(difference, tokens.rows) * surrogates.row_means(difference, tokens.rows)
        loss = surrogates.weighted_logprob(tokens.logprobs, difference.new_ones(()), tokens.advantages)
        return loss + self.tau / 2 * square, {"mirror_square": square.detach()}
