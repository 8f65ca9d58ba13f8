"""Learning rate as a pure function of the run's step: nothing to save but the step itself."""

from __future__ import annotations

import math

from rollcli.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Returns the learning rate of step `step` (from 0) of `total`; all updates of a step share it.

    It rises linearly over `warmup_steps`, reaching the peak at the step after the warm-up, then is constant, or falls
    to 0 at `total` along a line or half a cosine.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = min((step - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
