"""How token losses add up, as weights per token: the loss of a minibatch is the sum of weight × token loss.

Weights are computed for the whole minibatch before it is split, so denominators are global. All functions take a batch
of B trajectories with T tokens and return float32 `[T]`; positions off the loss mask get 0, and a batch without a
trained token gets zeros (loss 0, no NaN).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollcli.data.batch import Batch


def _counts(batch: Batch) -> np.ndarray:
    """Trained tokens of each trajectory, int64 `[B]`."""
    return np.bincount(batch.rows, weights=batch.tokens["loss_mask"], minlength=len(batch)).astype(np.int64)


def token_mean(batch: Batch) -> np.ndarray:
    """Every trained token counts the same (DAPO, arXiv 2503.14476, eq. 8)."""
    mask = batch.tokens["loss_mask"]
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


def seq_mean_token_mean(batch: Batch) -> np.ndarray:
    """Mean over trajectories of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3)."""
    counts = _counts(batch)
    trained = max(int((counts > 0).sum()), 1)
    per_row = 1.0 / (np.maximum(counts, 1) * trained)
    return (batch.tokens["loss_mask"] * per_row[batch.rows]).astype(np.float32)


def seq_mean_token_sum(batch: Batch) -> np.ndarray:
    """Mean over trajectories of the sum over their tokens."""
    trained = max(int((_counts(batch) > 0).sum()), 1)
    return (batch.tokens["loss_mask"] / trained).astype(np.float32)


MODES: dict[str, Callable[[Batch], np.ndarray]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
}
