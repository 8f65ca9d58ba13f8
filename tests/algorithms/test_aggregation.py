"""Loss aggregation: fixture A of the acceptance list, worked by hand, and what must not change the weights."""

import numpy as np
import pytest

from rollcli.algorithms import aggregation
from rollcli.data.batch import Batch

# Two answers of 4 tokens: losses [1, 0, 0, 0] and [2, 2, 2, 0], of which 1 and 3 are trained.
LOSSES = np.array([1, 0, 0, 0, 2, 2, 2, 0], dtype=np.float64)
MASK = np.array([1, 0, 0, 0, 1, 1, 1, 0], dtype=bool)
VALUES = [
    ("token-mean", 1.75),
    ("seq-mean-token-mean", 1.5),
    ("seq-mean-token-sum", 3.5),
    ("seq-mean-token-sum-norm", 0.875),
]


def batch_of(lengths: list[int], mask: np.ndarray, budget: int = 4) -> Batch:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Batch(offsets, {"loss_mask": np.asarray(mask, bool)}, {"budget": np.full(len(lengths), budget)})


@pytest.mark.parametrize(("mode", "value"), VALUES)
def test_fixture_a(mode: str, value: float) -> None:
    weights = aggregation.MODES[mode](batch_of([4, 4], MASK), None)
    assert weights.dtype == np.float32
    assert (weights * LOSSES).sum() == pytest.approx(value, abs=1e-6)
    assert not weights[~MASK].any()


@pytest.mark.parametrize(("mode", "value"), VALUES)
@pytest.mark.parametrize("parts", [[[0], [1]], [[1], [0]], [[], [0, 1]]])
def test_fixture_a_as_micro_batches_or_ranks(mode: str, value: float, parts: list[list[int]]) -> None:
    """Each part adds its own tokens' share; no part divides by a count of its own."""
    batch = batch_of([4, 4], MASK)
    batch.tokens |= {"weights": aggregation.MODES[mode](batch, None), "losses": LOSSES}
    selected = [batch.select(np.array(part, dtype=np.int64)).tokens for part in parts]
    assert sum((part["weights"] * part["losses"]).sum() for part in selected) == pytest.approx(value)


def test_token_mean_divides_by_trained_tokens_alone() -> None:
    weights = aggregation.token_mean(batch_of([3], [1, 1, 0]))
    assert (weights * [1, 1, 100]).sum() == 1.0


def test_a_loss_sum_of_ten_over_five_tokens_is_two() -> None:
    assert (aggregation.token_mean(batch_of([5], [1] * 5)) * 2.0).sum() == pytest.approx(2.0)


@pytest.mark.parametrize(("divisor", "budget", "value"), [(None, 4, 0.875), (None, 7, 0.5), (2, 4, 1.75), (1, 4, 3.5)])
def test_the_constant_is_given_or_else_the_budget(divisor: int | None, budget: int, value: float) -> None:
    weights = aggregation.seq_mean_token_sum_norm(batch_of([4, 4], MASK, budget), divisor)
    assert (weights * LOSSES).sum() == pytest.approx(value)


@pytest.mark.parametrize("mode", aggregation.MODES)
def test_nothing_trained_gives_zeros(mode: str) -> None:
    weights = aggregation.MODES[mode](batch_of([4, 4], np.zeros(8)), None)
    assert weights.tolist() == [0.0] * 8
    assert aggregation.MODES[mode](batch_of([], np.zeros(0)), None).shape == (0,)


@pytest.mark.parametrize("mode", aggregation.MODES)
def test_a_fully_masked_answer_does_not_count(mode: str) -> None:
    """Two answers of loss 1 per token, the second truncated and masked: 1, not 0.5."""
    weights = aggregation.MODES[mode](batch_of([4, 4], [1, 1, 1, 1, 0, 0, 0, 0]), None)
    expected = 4.0 if mode == "seq-mean-token-sum" else 1.0
    assert weights.sum() == pytest.approx(expected)


@pytest.mark.parametrize("mode", aggregation.MODES)
def test_order_of_answers_and_split_do_not_change_a_tokens_weight(mode: str) -> None:
    batch = batch_of([4, 2, 3], [1, 0, 1, 1, 0, 1, 1, 1, 0])
    whole = aggregation.MODES[mode](batch, None)
    batch.tokens["w"] = whole
    order = np.array([2, 0, 1])
    moved = batch.select(order)
    assert np.array_equal(aggregation.MODES[mode](moved, None), moved.tokens["w"])


def test_against_a_loop() -> None:
    random = np.random.default_rng(0)
    lengths = [3, 0, 7, 1, 5]
    mask, losses = random.random(16) < 0.6, random.normal(size=16)
    rows = np.split(losses, np.cumsum(lengths)[:-1]), np.split(mask, np.cumsum(lengths)[:-1])
    kept = [row[trained] for row, trained in zip(*rows, strict=True) if trained.any()]
    expected = {
        "token-mean": np.concatenate(kept).mean(),
        "seq-mean-token-mean": np.mean([row.mean() for row in kept]),
        "seq-mean-token-sum": np.mean([row.sum() for row in kept]),
        "seq-mean-token-sum-norm": np.mean([row.sum() / 9 for row in kept]),
    }
    for mode, value in expected.items():
        weights = aggregation.MODES[mode](batch_of(lengths, mask, budget=9), None)
        assert (weights * losses).sum() == pytest.approx(value, abs=1e-6)
