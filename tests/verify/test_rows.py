"""Plain rows as batches, and back."""

from __future__ import annotations

import numpy as np

from rollcli.algorithms.reinforce import Reinforce
from rollcli.verify import rows

MASK = [[0, 1, 1], [1]]


def test_a_batch_is_as_rollout_leaves_it():
    batch = rows.make_batch(MASK, [2, 3], [7, 3], ids=[[5, 6, 7], [8]], budget=4, truncated=[0, 1])
    assert batch.lengths.tolist() == [3, 1] and batch.tokens["ids"].tolist() == [5, 6, 7, 8]
    assert batch.tokens["loss_mask"].tolist() == [False, True, True, True]
    assert batch.samples["reward"].tolist() == [2, 3] and batch.samples["group"].tolist() == [7, 3]
    assert batch.samples["sampled"].tolist() == [2, 1] and batch.samples["budget"].tolist() == [4, 4]
    assert batch.samples["truncated"].tolist() == [False, True]
    assert rows.make_batch(MASK).samples["group"].tolist() == [0, 0]


def test_rewards_of_tokens_add_up_over_trained_ones():
    batch = rows.rewarded([[9, 1, 2], [4]], MASK)
    assert batch.samples["reward"].tolist() == [3, 4] and batch.tokens["turn_rewards"].tolist() == [9, 1, 2, 4]


def test_advantages_of_rows_or_tokens():
    ids = [[5, 6, 7], [8]]
    assert rows.advantaged(ids, MASK, [1, -1]).tokens["advantages"].tolist() == [1, 1, 1, -1]
    assert rows.advantaged(ids, MASK, [[1, 2, 3], [4]]).tokens["advantages"].tolist() == [1, 2, 3, 4]


def test_advantages_of_an_algorithm_row_by_row():
    batch = rows.make_batch(MASK, [2, 3])
    assert rows.rows_of(batch, rows.advantages_of(Reinforce(), batch)) == [[0, 2, 2], [3]]
    assert rows.rows_of(rows.make_batch([[1]]), np.array([True])) == [[1.0]]
