"""What policy-gradient algorithms share: building blocks around an estimate of advantages and a surrogate loss.

    reward ─shaping─▶ score ─(KL in reward)─▶ estimate ─whiten, clip─▶ advantage        once, on the whole batch
    surrogate(ratio, advantage) × rollout correction + KL in loss - entropy bonus        per token
    masking, aggregation                                                                 which tokens, and their shares

A subclass says what is its own: defaults of the blocks, `estimate`, `surrogate`, and where it allows fewer, the choice
of `aggregation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from rollcli.algorithms import aggregation, surrogates
from rollcli.algorithms.advantages import EQUAL, group_normalized, spread_over_tokens, whitened
from rollcli.algorithms.base import Algorithm, TrainedTokens
from rollcli.algorithms.correction import Correction
from rollcli.algorithms.entropy import entropy
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.masking import Masking
from rollcli.algorithms.shaping import Shaping
from rollcli.config.schema import Problems, not_negative, positive
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group

if TYPE_CHECKING:
    from torch import Tensor

    from rollcli.config.schema import RlRecipe

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass
class PolicyGradient(Algorithm):
    """Options that every policy-gradient algorithm has."""

    aggregation: Aggregation = "token-mean"
    """How token losses add up."""
    divisor: int | None = None
    """Constant of `seq-mean-token-sum-norm`; null is the most tokens an answer may have."""
    shaping: Shaping = field(default_factory=Shaping)
    """From rewards to scores."""
    kl: KlPenalty = field(default_factory=KlPenalty)
    """Penalty for leaving the reference model."""
    whiten: bool = False
    """Give the advantages of all trained tokens of a step mean 0 and standard deviation 1."""
    advantage_clip: float | None = None
    """Keep advantages within plus and minus this; null does not."""
    masking: Masking = field(default_factory=Masking)
    """What takes no part in the update, and weights of what does."""
    correction: Correction = field(default_factory=Correction)
    """What is done about the gap between rollout engine and trainer."""
    entropy_coefficient: float = 0.0
    """Weight of a bonus for the entropy of each next-token distribution."""
    dynamic_sampling: bool = False
    """Replace groups whose answers are all right or all wrong, which teach nothing."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from positive(self, "divisor", "advantage_clip")
        yield from not_negative(self, "entropy_coefficient")
        if self.divisor is not None and self.aggregation != "seq-mean-token-sum-norm":
            yield "divisor", f"`aggregation: {self.aggregation}` has no constant; `seq-mean-token-sum-norm` has"

    def recipe_problems(self, recipe: RlRecipe) -> Problems:
        """Yields values that do not go with the rest of the recipe."""
        if recipe.group_size == 1 and self.dynamic_sampling and not self.compares_group():
            yield "group_size", "is 1: with `dynamic_sampling` every group is of one mind, and refused"
        buffer, budget = self.shaping.overlong_buffer, recipe.rollout.sampling.max_tokens
        if buffer is not None and buffer > budget:
            message = f"is {buffer:g} tokens, the whole answer at most {budget}"
            yield "algorithm.shaping.overlong_buffer", f"{message}: even an empty one would be penalized"
        if self.kl.coefficient > 0 and "reference" not in self.needs():
            yield "algorithm.kl.coefficient", f"is {self.kl.coefficient:g}, but `needs` names no reference model"

    def estimate(self, batch: Batch, scores: np.ndarray, kl_rewards: np.ndarray) -> np.ndarray:
        """Returns the advantage of each token, float64 `[T]`, from shaped rewards `[B]` and KL rewards `[T]`.

        By default every token gets its trajectory's outcome, the KL of its tokens taken off.
        """
        totals = scores + np.bincount(batch.rows, weights=kl_rewards, minlength=len(batch))
        return spread_over_tokens(batch, self.outcome(batch, totals))

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns the advantage of each trajectory, float64 `[B]`, from its score."""
        return scores

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the policy loss of each token `[N]`, and metrics `[N]`."""
        raise NotImplementedError

    def needs(self) -> frozenset[str]:
        """What the KL penalty needs."""
        return frozenset(self.kl.needs())

    @property
    def old_from_rollout(self) -> bool:
        """Follows `correction.old_logprobs`."""
        return self.correction.old_logprobs == "rollout"

    def compares_group(self) -> bool:
        """Also where shaping takes the group's mean off."""
        return self.group_relative or self.shaping.mean == "group"

    def keep_group(self, group: Group) -> bool:
        """Judges by the task's own accuracy, which reward shaping cannot disturb."""
        accuracies = [trajectory.accuracy for trajectory in group.usable]
        return not self.dynamic_sampling or max(accuracies) - min(accuracies) > EQUAL

    def prepare(self, batch: Batch) -> None:
        """Masks tokens and adds the sample columns `weight`, `score`, and `divisor`: all minibatches share one."""
        longest = int(batch.samples["budget"].max(initial=1))
        batch.samples["divisor"] = np.full(len(batch), self.divisor or longest)
        batch.tokens["loss_mask"] = self.masking.mask(batch)
        batch.samples["weight"] = self.masking.weights(batch)
        batch.samples["score"] = self.shaping(batch)

    def advantages(self, batch: Batch) -> np.ndarray:
        """Estimates, then whitens and clips."""
        mask = batch.tokens["loss_mask"]
        values = self.estimate(batch, batch.samples["score"], self.kl.rewards(batch))
        if self.whiten:
            values = whitened(values, mask)
        if self.advantage_clip is not None:
            values = values.clip(-self.advantage_clip, self.advantage_clip)
        return np.where(mask, values, 0.0).astype(np.float32)

    def loss_weights(self, batch: Batch) -> np.ndarray:
        """Follows `aggregation`, times each trajectory's own weight."""
        shares = aggregation.MODES[self.aggregation](batch, int(batch.samples["divisor"].max(initial=1)))
        return (shares * batch.samples["weight"][batch.rows]).astype(np.float32)

    def loss(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Corrects the surrogate for the rollout gap; adds the KL penalty, takes the entropy bonus off."""
        loss, metrics = self.surrogate(tokens)
        weights, corrected = self.correction.weights(tokens)
        penalty, divergence = self.kl.loss(tokens)
        loss = loss * weights + penalty
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * entropy(tokens.logits)
        return loss, metrics | corrected | divergence

    def observe(self, metrics: Mapping[str, float], samples: int) -> None:
        """Adapts the KL coefficient."""
        if "kl_reference" in metrics:
            self.kl.observe(metrics["kl_reference"], samples)

    def state(self) -> dict[str, Any]:
        """The blocks that have any."""
        return {"kl": self.kl.state(), "shaping": self.shaping.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
        self.kl.restore(state["kl"])
        self.shaping.restore(state["shaping"])


@dataclass
class Clipped(PolicyGradient):
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7) as policy loss."""

    clip_low: float = 0.2
    """The ratio's gain stops below 1 minus this."""
    clip_high: float = 0.2
    """The ratio's gain stops above 1 plus this."""
    dual_clip: float | None = None
    """Bound the loss of a bad token by this times its advantage, such as 3 (arXiv 1912.09729); null does not."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        yield from positive(self, "clip_low", "clip_high")
        if self.clip_low > 1:
            yield "clip_low", f"is {self.clip_low}: a ratio is never below 0, so at most 1 makes sense"
        if self.dual_clip is not None and self.dual_clip <= 1:
            yield "dual_clip", f"must be above 1, or it cuts the loss of unchanged tokens; is {self.dual_clip}"

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Clips each token's ratio."""
        ratio = surrogates.ratio(tokens.logprobs, tokens.old_logprobs)
        loss, active = surrogates.dual_clipped(ratio, tokens.advantages, self.clip_low, self.clip_high, self.dual_clip)
        return loss, {"clip_share": active}


@dataclass
class Unclipped(PolicyGradient):
    """REINFORCE as policy loss: `-ρ A`, whose gradient on-policy is `-A ∇log π`."""

    aggregation: Aggregation = "seq-mean-token-sum"
    """How token losses add up."""

    def surrogate(self, tokens: TrainedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighs each token's advantage by its ratio."""
        return -surrogates.ratio(tokens.logprobs, tokens.old_logprobs) * tokens.advantages, {}


@dataclass
class GroupNormalized(PolicyGradient):
    """GRPO's advantages (arXiv 2402.03300, §4.1.2): an answer's score relative to its group."""

    scale: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides advantages: the group's, that of the whole batch, or none."""

    group_relative: ClassVar[bool] = True

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        if self.scale == "group" and self.kl.place == "reward" and self.kl.coefficient > 0:
            yield (
                "kl.place",
                "`reward` makes small differences in KL into whole advantages where a group's rewards agree, since "
                "`scale: group` divides by them; use `loss`, or another scale",
            )

    def outcome(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Returns the score relative to the group."""
        return group_normalized(scores, batch.samples["group"], self.scale)
