"""REINFORCE++: undiscounted returns with KL token by token, whitened over the batch."""

import numpy as np
import pytest

from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.reinforce_pp import ReinforcePp
from tests.algorithms.batches import advantages, batch_of


def test_returns_by_hand() -> None:
    # KL 0.5 at the first token and -0.25 at the second, coefficient 1.
    batch = batch_of([".00"], [2.0], old_logprobs=[3, -1, -1], reference_logprobs=[0, -1.5, -0.75])
    algorithm = ReinforcePp(kl=KlPenalty(1.0, "k1", "reward"), whiten=False)
    assert advantages(algorithm, batch).tolist() == [0, 1.75, 2.25]


def test_the_reward_reaches_the_tokens_before_a_tools_answer() -> None:
    assert advantages(ReinforcePp(whiten=False), batch_of(["00..1"], [1.0])).tolist() == [1, 1, 0, 0, 1]


def test_against_a_slow_reference() -> None:
    random = np.random.default_rng(0)
    layouts = [".000", "..0.1", "0", ".00.11.2"]
    length = sum(map(len, layouts))
    old, reference = random.normal(size=(2, length)).astype(np.float32)
    batch = batch_of(layouts, random.normal(size=4), [0, 1, 2, 3], old_logprobs=old, reference_logprobs=reference)
    plain = np.zeros(length)
    mask = batch.tokens["loss_mask"]
    for t in np.flatnonzero(mask):
        later = [s for s in range(t, batch.offsets[batch.rows[t] + 1]) if mask[s]]
        plain[t] = batch.samples["reward"][batch.rows[t]] - sum(
            0.01 * (float(old[s]) - float(reference[s])) for s in later
        )
    expected = np.where(mask, (plain - plain[mask].mean()) / plain[mask].std(ddof=1), 0)
    assert advantages(ReinforcePp(), batch) == pytest.approx(expected, abs=1e-5)


def test_one_answer_is_enough() -> None:
    assert not ReinforcePp().compares_group() and ReinforcePp().needs() == {"reference", "old"}
    assert np.isfinite(advantages(ReinforcePp(), batch_of(["0"], [3.0]))).all()
