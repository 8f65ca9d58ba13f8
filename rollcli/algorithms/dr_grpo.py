"""Dr. GRPO: GRPO done right (arXiv 2503.20783, §3.2): neither length nor difficulty biases the gradient.

    A_i = r_i - mean r          J = 1/G Σ_i 1/L Σ_t min(ρ_it A_i, clip(ρ_it, 1-ε, 1+ε) A_i)

with a constant L in place of the answer's own length, and no standard deviation. The defaults are the paper's: L is the
most tokens an answer may have, and there is no KL penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty


@dataclass
class DrGrpo(Grpo):
    """GRPO without division by standard deviation and length."""

    aggregation: Literal["seq-mean-token-sum-norm", "seq-mean-token-sum"] = "seq-mean-token-sum-norm"
    """How token losses add up."""
    kl: KlPenalty = field(default_factory=KlPenalty)
    """Penalty for leaving the reference model."""
    scale: Literal["none"] = "none"
    """Dividing by the standard deviation is what this algorithm leaves out."""
