"""How token losses add up, as weights per token: the loss of a minibatch is the sum of weight × token loss.

Weights are computed for the whole minibatch before it is split, so denominators are global. All functions take a batch
of B trajectories with T tokens and return float32 `[T]`; positions off the loss mask get 0, a trajectory without a
trained token counts nowhere, and a batch without one gets zeros (loss 0, no NaN).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollcli.data.batch import Batch

Mode = Callable[[Batch, int | None], np.ndarray]


def token_mean(batch: Batch, divisor: int | None = None) -> np.ndarray:
    """Every trained token counts the same (DAPO, arXiv 2503.14476, eq. 8)."""
    mask = batch.tokens["loss_mask"]
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


def seq_mean_token_mean(batch: Batch, divisor: int | None = None) -> np.ndarray:
    """Mean over trajectories of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3)."""
    counts = batch.trained_lengths
    per_row = 1.0 / (np.maximum(counts, 1) * _trajectories(counts))
    return (batch.tokens["loss_mask"] * per_row[batch.rows]).astype(np.float32)


def seq_mean_token_sum(batch: Batch, divisor: int | None = None) -> np.ndarray:
    """Mean over trajectories of the sum over their tokens (REINFORCE)."""
    return (batch.tokens["loss_mask"] / _trajectories(batch.trained_lengths)).astype(np.float32)


def seq_mean_token_sum_norm(batch: Batch, divisor: int | None = None) -> np.ndarray:
    """Mean over trajectories of their sum over a constant (Dr. GRPO, arXiv 2503.20783, §3.2).

    The constant is `divisor`, or the most tokens an answer may have, which the batch knows.
    """
    if divisor is None:
        divisor = int(batch.samples["budget"].max(initial=1))
    return (seq_mean_token_sum(batch) / divisor).astype(np.float32)


def _trajectories(counts: np.ndarray) -> int:
    return max(int((counts > 0).sum()), 1)


MODES: dict[str, Mode] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
