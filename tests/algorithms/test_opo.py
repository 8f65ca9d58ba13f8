"""OPO: the baseline is the group's mean weighted by length; no clip."""

import math

import pytest

from rollcli.algorithms.masking import Masking
from rollcli.algorithms.opo import Opo
from tests.algorithms.batches import advantages, batch_of, gradient, trained


def test_by_hand() -> None:
    # (3 × 1 + 1 × 0) / 4 = 0.75, and (1 × 2 + 1 × 4) / 2 = 3.
    batch = batch_of([".000", "...0", "0", ".0"], [1, 0, 2, 4], [5, 5, 1, 1])
    assert advantages(Opo(), batch).tolist() == [0, 0.25, 0.25, 0.25, 0, 0, 0, -0.75, -1, 0, 1]


def test_length_is_what_was_sampled_and_not_what_is_trained() -> None:
    batch = batch_of(["00.0", "0"], [1, 0], turns=[0, 0, -1, 1, 0])
    assert advantages(Opo(masking=Masking(turns="last")), batch).tolist() == [0, 0, 0, 0.25, -0.75]


def test_no_clip_and_no_penalty() -> None:
    tokens = trained([0.0, 0.0], [-1.0, -1.0], advantages=[1.0, -1.0])
    assert gradient(Opo(), tokens) == pytest.approx([-math.e, math.e]) and Opo().needs() == frozenset()
