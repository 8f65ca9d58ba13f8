"""What a run consists of: defaults that stand for the plain case."""

from __future__ import annotations

from rollcli.devices.lengths import Fixed
from rollcli.devices.workload import Trace, Work


def test_the_plain_case_is_one_turn_that_nothing_waits_for():
    work = Work(1, 2, 3.0, Fixed(4))
    assert (work.turns.mean, work.environment_s.mean, work.reward_s.mean, work.refused) == (1, 0, 0, 0)


def test_traces_do_not_share_what_they_count():
    Trace().ends.append(1.0)
    assert Trace().ends == []
