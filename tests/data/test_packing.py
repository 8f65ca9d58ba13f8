"""Rows and micro-batches: every token exactly once, at the right place, within the budget."""

import numpy as np
import pytest

from rollcli.data.batch import Batch
from rollcli.data.packing import MicroBatch, micro_batches


def batch_of(lengths: list[int]) -> Batch:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Batch(offsets, {"ids": np.arange(1, offsets[-1] + 1, dtype=np.int32)})


def check(batch: Batch, made: list[MicroBatch], budget: int) -> None:
    """What must hold of any layout."""
    sources = np.concatenate([micro.source for micro in made]) if made else np.zeros(0)
    assert sorted(sources.tolist()) == list(range(int(batch.offsets[-1])))
    starts = batch.offsets[batch.rows]
    for micro in made:
        assert micro.ids.size <= budget or len(np.unique(batch.rows[micro.source])) == 1
        assert len(np.unique(micro.place)) == len(micro.place)
        assert np.array_equal(micro.ids.flat[micro.place], batch.tokens["ids"][micro.source])
        assert np.array_equal(micro.positions.flat[micro.place], micro.source - starts[micro.source])
        # A sequence stands in one row, without gaps.
        for row in np.unique(batch.rows[micro.source]):
            places = micro.place[batch.rows[micro.source] == row]
            assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
            assert places[0] // micro.ids.shape[1] == places[-1] // micro.ids.shape[1]
        # Where a position does not follow its neighbour's, a sequence or the filler starts: at 0 when packed.
        if micro.packed:
            steps = np.diff(micro.positions, axis=1)
            assert np.all((steps == 1) | (micro.positions[:, 1:] == 0))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("budget", [1, 8, 16, 40, 10_000])
def test_every_token_once_within_the_budget(budget: int, packing: bool) -> None:
    random = np.random.default_rng(budget)
    for _ in range(20):
        batch = batch_of(random.integers(0, 17, size=random.integers(1, 15)).tolist())
        made = micro_batches(batch, budget, packing)
        check(batch, made, budget)
        assert packing or not any(micro.packed for micro in made)


def test_a_sequence_longer_than_the_budget_is_alone_and_whole() -> None:
    made = micro_batches(batch_of([3, 20, 4]), 8, True)
    assert made[0].ids.tolist() == [list(range(4, 24))] and not made[0].packed
    assert [micro.ids.size for micro in made] == [20, 8] or [micro.ids.size for micro in made] == [20, 4, 3]


def test_packing_fills_rows() -> None:
    batch = batch_of([6, 3, 3, 2, 2, 2])
    (micro,) = micro_batches(batch, 18, True)
    assert micro.ids.shape == (3, 6) and micro.packed
    assert sorted(len(row[row > 0]) for row in micro.ids) == [6, 6, 6]
    padded = micro_batches(batch, 18, False)
    assert [made.ids.shape for made in padded] == [(3, 6), (3, 2)]


def test_filler_behind_packed_sequences_starts_at_zero() -> None:
    (micro,) = micro_batches(batch_of([9, 4, 3]), 18, True)
    assert micro.positions.tolist() == [list(range(9)), [0, 1, 2, 3, 0, 1, 2, 0, 1]]


def test_padding_behind_a_lone_sequence_goes_on_counting() -> None:
    (micro,) = micro_batches(batch_of([4, 2]), 8, False)
    assert micro.positions.tolist() == [[0, 1, 2, 3]] * 2 and micro.ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]


def test_nothing_to_lay_out() -> None:
    assert micro_batches(batch_of([]), 8, True) == [] and micro_batches(batch_of([0, 0]), 8, False) == []


def test_ten_samples_four_at_a_time() -> None:
    batch = batch_of([5] * 10)
    made = micro_batches(batch, 20, False)
    assert [len(micro.ids) for micro in made] == [4, 4, 2]
    check(batch, made, 20)
