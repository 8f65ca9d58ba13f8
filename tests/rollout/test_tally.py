"""Counts of a batch: what is shown, what is too much, and where one batch ends and the next begins."""

from __future__ import annotations

import numpy as np
import pytest

from rollcli.data.carriers import Task, Trajectory
from rollcli.errors import RolloutError
from rollcli.rollout.tally import Tally

PROBLEM = Task("t", 3, [])


def ended(sample: int, kind: str | None = None, error: str = "", tokens: int = 2) -> Trajectory:
    """Returns an episode that succeeded, or failed for a reason."""
    done = Trajectory.failed(PROBLEM, sample, kind, error) if kind else Trajectory.failed(PROBLEM, sample, "", "")
    done.loss_mask = np.ones(tokens, bool)
    if kind is None:
        done.error = done.error_kind = None
    return done


def tally_of(*trajectories: Trajectory) -> Tally:
    tally = Tally(samples=len(trajectories))
    for trajectory in trajectories:
        tally.take([trajectory])
    return tally


def test_counts_by_hand():
    tally = tally_of(ended(0), ended(1, tokens=9), ended(2, "timeout", "slow"), ended(3, "reward", "bad"))
    tally.groups_started, tally.groups_aborted, tally.episodes_restarted = 5, 1, 2
    tally.groups_refused["all wrong"] += 3
    tally.groups_refused["failed"] += 1
    assert tally.metrics() == {
        "groups_started": 5, "groups_rejected": 4, "groups_rejected/all wrong": 3, "groups_rejected/failed": 1,
        "groups_aborted": 1, "episodes_restarted": 2, "failed": 2, "failed/reward": 1, "failed/timeout": 1,
    }  # fmt: skip
    assert tally.longest == 9 and all(isinstance(value, float) for value in tally.metrics().values())


def test_a_failure_without_a_kind_is_counted_too():
    failed = ended(0, "timeout", "slow")
    failed.error_kind = None
    assert tally_of(failed).failures == {"unknown": 1}


def test_the_three_commonest_errors_with_the_first_sample_of_each():
    tally = tally_of(
        ended(0, "timeout", "slow"), ended(1, "reward", "bad"), ended(2, "timeout", "slow"), ended(3, "reward", "bad"),
        ended(4, "timeout", "slow"), ended(5, "environment", "KeyError: 1"), ended(6, "environment", "KeyError: 2"),
    )  # fmt: skip
    assert tally.commonest() == (
        "3 × timeout: slow (t/3, sample 0); 2 × reward: bad (t/3, sample 1); "
        "1 × environment: KeyError: 1 (t/3, sample 5)"
    )


def test_the_numbers_judged_are_the_numbers_told():
    tally = tally_of(ended(0), ended(1, "timeout", "slow"))
    tally.check_failures(0.5, 1, 2)
    with pytest.raises(RolloutError, match=r"2 of 4 episodes failed; the commonest: 1 × timeout: slow") as caught:
        tally.check_failures(0.49, 2, 4)
    assert "rollout.max_failure_share" in caught.value.hint
    tally.check_failures(0.49, 1, 3)
    Tally().check_failures(0.0, 0, 0)


def test_attempts_are_refused_groups_and_those_still_needed():
    tally = Tally(groups_started=9)
    tally.groups_refused["all right"] += 4
    tally.check_attempts(2, 3)
    tally.groups_refused["all wrong"] += 1
    with pytest.raises(RolloutError) as caught:
        tally.check_attempts(2, 3)
    assert caught.value.message == (
        "9 groups were sampled for a batch of 2 and too few are worth training on; "
        "of the 5 refused: 80% all right, 20% all wrong"
    )
    assert "failures" not in caught.value.hint
    tally.take([ended(0, "timeout", "slow")])
    with pytest.raises(RolloutError) as caught:
        tally.check_attempts(2, 3)
    assert caught.value.hint.endswith("failures: 1 × timeout: slow (t/3, sample 0)")


def test_a_cut_keeps_what_was_and_begins_anew_with_what_is_under_way():
    tally = tally_of(ended(0), ended(1, "timeout", "slow"))
    tally.samples, tally.groups_started = 8, 2
    tally.groups_refused["failed"] += 1
    before = tally.cut()
    tally.take([ended(2, "reward", "bad")])
    assert (before.samples, before.episodes, before.groups_started) == (8, 2, 2)
    assert before.failures == {"timeout": 1} and before.groups_refused == {"failed": 1}
    assert (tally.samples, tally.episodes, tally.groups_started) == (6, 1, 0)
    assert tally.failures == {"reward": 1} and not tally.groups_refused and "slow" not in tally.commonest()
