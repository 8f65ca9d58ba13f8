"""DAPO: Decoupled clip and dynamic sampling (arXiv 2503.14476, eq. 8).

    J = 1/Σ|o_i| Σ_i Σ_t min(ρ_it A_i, clip(ρ_it, 1-ε_low, 1+ε_high) A_i),    0 < right answers of a group < G

with GRPO's advantages and four changes: a higher upper clip, groups that are all right or all wrong replaced, every
token counted alike, and a soft penalty for answers that near the end of their budget. No KL penalty. The defaults are
the paper's; its penalty's buffer, 4,096 of 20,480 tokens, is kept as a fifth of the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Aggregation
from rollcli.algorithms.shaping import Shaping


@dataclass
class Dapo(Grpo):
    """GRPO with clip-higher, dynamic sampling, token mean and overlong shaping."""

    aggregation: Aggregation = "token-mean"
    """How token losses add up."""
    kl: KlPenalty = field(default_factory=KlPenalty)
    """Penalty for leaving the reference model."""
    clip_high: float = 0.28
    """The ratio's gain stops above 1 plus this."""
    dynamic_sampling: bool = True
    """Replace groups whose answers are all right or all wrong, which teach nothing."""
    shaping: Shaping = field(default_factory=lambda: Shaping(overlong_buffer=0.2))
    """From rewards to scores."""
