"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, eq. 3).

For G answers o_i to one question, with r_i their rewards and A_i = (r_i - mean r) / std r,

    J = 1/G Σ_i 1/|o_i| Σ_t  min(ρ_it A_i, clip(ρ_it, 1-ε, 1+ε) A_i) - β KL(π ‖ π_ref),     ρ_it = π / π_old

The defaults are the paper's; `clip_high` above `clip_low`, `aggregation: token-mean` and `dynamic_sampling` are DAPO's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from rollcli.algorithms import advantages, aggregation, kl, surrogates
from rollcli.algorithms.base import Algorithm, TrainedTokens
from rollcli.config.schema import Problems, not_negative, positive
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Grpo(Algorithm):
    """Advantages relative to the group, a clipped ratio, and KL to a reference in the loss."""

    clip_low: float = 0.2
    """The ratio's gain stops below 1 minus this."""
    clip_high: float = 0.2
    """The ratio's gain stops above 1 plus this."""
    kl_coefficient: float = 0.04
    """Weight β of the KL penalty; 0 starts no reference model."""
    scale: Literal["std", "none"] = "std"
    """Divide advantages by the group's standard deviation, or not."""
    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"] = "seq-mean-token-mean"
    """How token losses add up."""
    dynamic_sampling: bool = False
    """Replace groups whose answers are all right or all wrong, which teach nothing."""

    group_relative: ClassVar[bool] = True

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from positive(self, "clip_low", "clip_high")
        yield from not_negative(self, "kl_coefficient")

    def needs(self) -> frozenset[str]:
        """A reference only when it is paid for."""
        return super().needs() | ({"reference"} if self.kl_coefficient > 0 else set())

    def keep_group(self, group: Group) -> bool:
        """Judges by the task's own accuracy, which reward shaping cannot disturb."""
        accuracies = [trajectory.accuracy for trajectory in group.usable]
        return not self.dynamic_sampling or max(accuracies) - min(accuracies) > advantages.EQUAL

    def advantages(self, batch: Batch) -> np.ndarray:
        """Gives every sampled token of an answer the answer's advantage."""
        values = advantages.group_normalized(batch.samples["reward"], batch.samples["group"], self.scale)
        return (values[batch.rows] * batch.tokens["loss_mask"]).astype(np.float32)

    def loss_weights(self, batch: Batch) -> np.ndarray:
        """Follows `aggregation`."""
        return aggregation.MODES[self.aggregation](batch)

    def loss(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the negative of the summand above for each token."""
        ratio = (tokens.logprobs - tokens.old_logprobs).exp()
        loss, clip_share = surrogates.clipped(ratio, tokens.advantages, self.clip_low, self.clip_high)
        metrics = {"clip_share": clip_share}
        if tokens.reference_logprobs is not None:
            penalty = kl.k3(tokens.logprobs - tokens.reference_logprobs)
            loss = loss + self.kl_coefficient * penalty
            metrics["kl_reference"] = penalty.detach()
        return loss, metrics
