"""KL(policy ‖ reference): estimators from the log-probabilities of sampled tokens, and the penalty made of them.

`difference` is `logprobs - reference_logprobs` (Schulman, "Approximating KL Divergence"). All return one value per
token; those in a loss are float32 tensors with a gradient, those in a reward float64 arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollcli.algorithms import surrogates
from rollcli.algorithms.entropy import IMPOSSIBLE
from rollcli.config.schema import Problems, not_negative, positive
from rollcli.data.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from rollcli.algorithms.base import TrainedTokens


def k1(difference: Any) -> Any:
    """Unbiased, high variance, may be negative. As a loss its expected gradient is 0."""
    return difference


def k2(difference: Any) -> Any:
    """Half the squared difference: biased, low variance, and its gradient is the true one on-policy."""
    return difference * difference / 2


def k3(difference: Any) -> Any:
    """Unbiased, never negative: `exp(-d) - 1 + d` (GRPO, arXiv 2402.03300, eq. 4)."""
    if isinstance(difference, np.ndarray):
        return np.exp(np.minimum(-difference, surrogates.LOG_RATIO_LIMIT)) - 1 + difference
    # The exponent is limited in value alone: a token far off is still pulled back, and the loss stays finite.
    beyond = (-difference.detach() - surrogates.LOG_RATIO_LIMIT).clamp(min=0)
    return (-difference - beyond).exp() - 1 + difference


def k3_plus(difference: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2, straight through: both are unbiased on-policy."""
    surrogate = k2(difference)
    return k3(difference.detach()) + surrogate - surrogate.detach()


def full(logits: Tensor, reference: Tensor) -> Tensor:
    """The exact divergence at each token, over the whole vocabulary.

    Args:
        logits: `[N, V]`, of the policy, divided by the temperature.
        reference: `[N, V]`, log-probabilities of the reference.
    """
    policy = logits.log_softmax(-1)
    # A word that cannot be said has log-probability -inf, and 0 × inf is not a number.
    return (policy.exp() * (policy.clamp(min=IMPOSSIBLE) - reference.clamp(min=IMPOSSIBLE))).sum(-1)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}


@dataclass
class KlPenalty:
    """What it costs to leave the reference model."""

    coefficient: float = 0.0
    """Weight β of the penalty; 0 starts no reference model."""
    estimator: Literal["k1", "k2", "k3", "k3+", "full"] = "k3"
    """`k1`, `k2`, `k3`: from sampled tokens; `k3+`: value of k3, gradient of k2; `full`: over the whole vocabulary."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds it to each token's loss; `reward` takes it off each token's reward, without a gradient."""
    unbiased_gradient: bool = False
    """In the loss: weigh each token by π/π_old with its gradient, so that the expected gradient is that of the KL."""
    target: float | None = None
    """Adapt the coefficient so that the mean KL of a token comes to this (arXiv 1909.08593, §2.2); null keeps it."""
    horizon: int = 10000
    """Samples over which an adapted coefficient changes by at most a fifth."""

    _state: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from not_negative(self, "coefficient")
        yield from positive(self, "target", "horizon")
        if self.place == "reward" and self.estimator in ("k3+", "full"):
            yield "estimator", f"`{self.estimator}` differs by its gradient, which a reward has not: use k1, k2 or k3"
        if self.place == "reward" and self.unbiased_gradient:
            yield "unbiased_gradient", "a reward has no gradient: it is for `place: loss`"
        if self.place == "loss" and self.unbiased_gradient and self.estimator in ("k2", "k3+", "full"):
            yield "unbiased_gradient", f"the gradient of `{self.estimator}` is that of the KL already: leave it false"
        if self.target is not None and self.coefficient == 0:
            yield "coefficient", "is 0, which adapting cannot change: give a start, such as 0.01"

    def needs(self) -> set[str]:
        """The passes that the penalty takes."""
        if self.coefficient == 0:
            return set()
        passes = {"reference_distribution"} if self.estimator == "full" else set()
        return passes | {"reference"} | ({"old"} if self.place == "reward" else set())

    @property
    def current(self) -> float:
        """The coefficient as adapted so far."""
        return self._state.get("coefficient", self.coefficient)

    def rewards(self, batch: Batch) -> np.ndarray:
        """Returns the (negative) reward of each token, float64 `[T]`, 0 off the mask; all 0 with `place: loss`."""
        mask = batch.tokens["loss_mask"]
        result = np.zeros(len(mask), dtype=np.float64)
        if self.place == "reward" and self.coefficient > 0:
            difference = (batch.tokens["old_logprobs"] - batch.tokens["reference_logprobs"])[mask]
            result[mask] = -self.current * ESTIMATORS[self.estimator](difference.astype(np.float64))
        return result

    def loss(self, tokens: TrainedTokens) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Returns what is added to each token's loss `[N]`, and the divergence it is made of."""
        metrics = {}
        if self.target is not None:
            metrics["kl_coefficient"] = tokens.logprobs.detach() * 0 + self.current
        if self.place == "reward" or self.coefficient == 0:
            return 0.0, metrics
        difference = tokens.logprobs - tokens.reference_logprobs
        if self.estimator == "full":
            penalty = full(tokens.logits, tokens.reference_distribution)
        else:
            penalty = ESTIMATORS[self.estimator](difference)
        metrics["kl_penalty"] = penalty.detach()
        if self.unbiased_gradient:
            penalty = penalty * surrogates.ratio(tokens.logprobs, tokens.old_logprobs)
        return self.current * penalty, metrics

    def observe(self, measured: float, samples: int) -> None:
        """Adapts the coefficient to the KL measured on a step's samples, by a fifth at most."""
        if self.target is None or not math.isfinite(measured):
            return
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        self._state["coefficient"] = self.current * (1 + error * min(samples / self.horizon, 1.0))

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, and workers are told."""
        return dict(self._state)

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from a state."""
        self._state = dict(state)
