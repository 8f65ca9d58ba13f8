"""StarPO-S: GRPO over whole interactions, on the groups that differ most."""

import numpy as np
import pytest

from rollcli.algorithms.star_po import StarPo
from tests.algorithms.batches import advantages, batch_of, trained

ROOT = 0.5**0.5


def test_the_reward_of_an_interaction_goes_to_every_turn() -> None:
    batch = batch_of([".00.1", "0..1"], [1, 0])
    assert advantages(StarPo(), batch).tolist() == pytest.approx([0, ROOT, ROOT, 0, ROOT, -ROOT, 0, 0, -ROOT])


@pytest.mark.parametrize(("share", "kept"), [(0.25, [3]), (0.5, [3, 8]), (0.6, [3, 8, 5]), (1.0, [3, 8, 5, 1])])
def test_groups_of_the_largest_spread_are_trained(share: float, kept: list[int]) -> None:
    groups = np.array([5, 5, 3, 3, 8, 8, 1, 1])
    batch = batch_of([".0"] * 8, [0, 1, 0, 9, 0, 4, 2, 2], groups)
    algorithm = StarPo(keep_share=share)
    for order in (np.arange(8), np.array([7, 2, 4, 0, 6, 5, 1, 3])):
        moved = batch.select(order)
        algorithm.prepare(moved)
        trained_groups = {int(group) for group in moved.samples["group"][moved.trained_lengths > 0]}
        assert trained_groups == set(kept)
        assert algorithm.loss_weights(moved).sum() == pytest.approx(1)
        assert algorithm.advantages(moved).any()


def test_ties_go_to_the_earlier_group() -> None:
    batch = batch_of(["0"] * 8, [0, 1] * 4, [0, 0, 1, 1, 2, 2, 3, 3])
    StarPo().prepare(batch)
    assert batch.tokens["loss_mask"].tolist() == [True, True] + [False] * 6


def test_one_group_is_always_left() -> None:
    batch = batch_of(["0", "0"], [0, 1])
    StarPo(keep_share=0.01).prepare(batch)
    assert batch.tokens["loss_mask"].all()


def test_clip_higher_and_no_penalty() -> None:
    assert StarPo().loss(trained([0.0], [-1.0], advantages=[1.0]))[0].tolist() == pytest.approx([-1.28])
    assert StarPo().needs() == frozenset()


@pytest.mark.parametrize(("share", "names"), [(0.0, ["keep_share"]), (1.1, ["keep_share"]), (1.0, [])])
def test_options_that_make_no_sense(share: float, names: list[str]) -> None:
    assert [name for name, _ in StarPo(keep_share=share).problems()] == names
