"""Loss aggregation: fixture A of the acceptance list, worked by hand, and what must not change the weights."""

import numpy as np
import pytest

from rollcli.algorithms import aggregation
from rollcli.data.batch import Batch

# Two answers of 4 tokens: losses [1, 0, 0, 0] and [2, 2, 2, 0], of which 1 and 3 are trained.
LOSSES = np.array([1, 0, 0, 0, 2, 2, 2, 0], dtype=np.float64)
MASK = np.array([1, 0, 0, 0, 1, 1, 1, 0], dtype=bool)


def batch_of(lengths: list[int], mask: np.ndarray) -> Batch:
    return Batch(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), {"loss_mask": np.asarray(mask, bool)})


@pytest.mark.parametrize(
    ("mode", "value"),
    [("token-mean", 1.75), ("seq-mean-token-mean", 1.5), ("seq-mean-token-sum", 3.5)],
)
def test_fixture_a(mode: str, value: float) -> None:
    weights = aggregation.MODES[mode](batch_of([4, 4], MASK))
    assert weights.dtype == np.float32
    assert (weights * LOSSES).sum() == pytest.approx(value, abs=1e-6)
    assert not weights[~MASK].any()


def test_token_mean_divides_by_trained_tokens_alone() -> None:
    weights = aggregation.token_mean(batch_of([3], [1, 1, 0]))
    assert (weights * [1, 1, 100]).sum() == 1.0


@pytest.mark.parametrize("mode", aggregation.MODES)
def test_nothing_trained_gives_zeros(mode: str) -> None:
    weights = aggregation.MODES[mode](batch_of([4, 4], np.zeros(8)))
    assert weights.tolist() == [0.0] * 8
    assert aggregation.MODES[mode](batch_of([], np.zeros(0))).shape == (0,)


@pytest.mark.parametrize("mode", aggregation.MODES)
def test_a_fully_masked_answer_does_not_count(mode: str) -> None:
    """Two answers of loss 1 per token, the second truncated and masked: 1, not 0.5."""
    weights = aggregation.MODES[mode](batch_of([4, 4], [1, 1, 1, 1, 0, 0, 0, 0]))
    expected = 4.0 if mode == "seq-mean-token-sum" else 1.0
    assert weights.sum() == pytest.approx(expected)


@pytest.mark.parametrize("mode", aggregation.MODES)
def test_order_of_answers_and_split_do_not_change_a_tokens_weight(mode: str) -> None:
    batch = batch_of([4, 2, 3], [1, 0, 1, 1, 0, 1, 1, 1, 0])
    whole = aggregation.MODES[mode](batch)
    batch.tokens["w"] = whole
    order = np.array([2, 0, 1])
    moved = batch.select(order)
    assert np.array_equal(aggregation.MODES[mode](moved), moved.tokens["w"])
