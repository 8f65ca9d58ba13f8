"""REINFORCE++-baseline: the group's mean as baseline, the batch's tokens as scale."""

import numpy as np
import pytest

from rollcli.algorithms.reinforce_pp_baseline import ReinforcePpBaseline
from tests.algorithms.batches import advantages, batch_of, gradient, trained


def test_by_hand() -> None:
    # Centered: 0.5 on one token, -0.5 on three, 5 and -5: mean -1/6, over six tokens.
    batch = batch_of([".0", ".000", "0", "0"], [1, 0, 10, 0], [0, 0, 1, 1])
    plain = np.array([0.5, -0.5, -0.5, -0.5, 5, -5])
    got = advantages(ReinforcePpBaseline(), batch)
    assert got[batch.tokens["loss_mask"]] == pytest.approx((plain - plain.mean()) / plain.std(ddof=1))
    unscaled = advantages(ReinforcePpBaseline(whiten=False), batch)
    assert unscaled[batch.tokens["loss_mask"]].tolist() == plain.tolist()


def test_the_penalty_is_k2_in_the_loss() -> None:
    tokens = trained([-1.0], advantages=[0.0], reference_logprobs=[-3.0])
    loss, metrics = ReinforcePpBaseline().loss(tokens)
    assert loss.item() == pytest.approx(0.001 * 2) and metrics["kl_penalty"].item() == 2
    assert gradient(ReinforcePpBaseline(), tokens) == pytest.approx([0.001 * 2])
    assert ReinforcePpBaseline().needs() == {"reference"}
