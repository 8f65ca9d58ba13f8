"""Continuous batching: rows by hand."""

from __future__ import annotations

import pytest

from rollcli.devices.replicas import Replicas
from rollcli.devices.workload import Schedule, Speeds


class Next:
    """The next end of a row, as the last `schedule` told it."""

    def __call__(self, at, replica, stamp):
        self.at = at


@pytest.fixture
def one():
    """One replica of which a step takes as many seconds as it has rows, and its next event."""
    following = Next()
    return Replicas(Speeds((0.0, 1.0, 2.0, 3.0)), Schedule(1, 3), following), following


def test_a_row_is_slower_beside_another(one):
    replicas, following = one
    replicas.add(0, 0.0, 10, 0.0, ["long"])
    replicas.add(0, 0.0, 4, 0.0, ["short"])
    replicas.schedule(0, 0.0)
    assert following.at == pytest.approx(8)  # 4 tokens, 2 s each
    assert replicas.ended(0, 8.0) == [["short"]]
    replicas.schedule(0, 8.0)
    assert following.at == pytest.approx(8 + 6)
    assert replicas.ended(0, 14.0) == [["long"]]
    assert (replicas.decoding_s, replicas.sampled, replicas.busy) == (14, 14, 0)
    assert replicas.row_s == 8 * 2 + 6


def test_prefill_and_pauses_hold_all_rows_up(one):
    replicas, following = one
    replicas.add(0, 0.0, 5, 3.0, ["a"])
    replicas.schedule(0, 0.0)
    assert following.at == 8
    replicas.pause(4.0, 10.0)
    assert following.at == 18
    assert replicas.ended(0, 18.0) == [["a"]]
    assert replicas.decoding_s == 8  # prefill counts, the pause does not


def test_a_row_that_begins_in_a_pause_waits_for_its_end(one):
    replicas, following = one
    replicas.pause(0.0, 5.0)
    replicas.add(0, 2.0, 1, 0.0, ["a"])
    replicas.schedule(0, 2.0)
    assert following.at == 6


def test_more_rows_than_are_known_slow_down_in_proportion(one):
    assert one[0].seconds(6) == 6.0


def test_cleared_rows_are_gone(one):
    replicas, _ = one
    replicas.add(0, 0.0, 5, 0.0, ["a"])
    replicas.clear(2.0)
    assert replicas.busy == 0 and replicas.sampled == 2 and replicas.ended(0, 9.0) == []
