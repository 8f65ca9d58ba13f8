"""Every number worked out by hand."""

import pytest

from rollcli.pipelines.metrics import of_rollout, of_updates
from tests.pipelines.groups import failed, group, trajectory


@pytest.fixture
def groups():
    """Two tasks; the policy about to be updated is version 5."""
    return [
        group(
            "sums", 0,
            trajectory(0, 3, [5, 5], reward=1.0, accuracy=1.0, stop_reason="stop", metrics={"format": 1.0}),
            trajectory(1, 3, [5, 5, 5, 5], reward=0.0, accuracy=0.0, stop_reason="length", metrics={"format": 0.0}),
            failed("sums", 0, 2),
        ),
        group(
            "words", 7,
            trajectory(0, 2, [3, 4, 5], reward=0.5, accuracy=1.0, stop_reason="stop", metrics={"steps": 6.0}),
            trajectory(1, 2, [4], reward=0.5, accuracy=0.0, stop_reason="stop", metrics={"steps": 3.0}),
        ),
    ]  # fmt: skip


def test_a_rollout(groups):
    assert of_rollout(groups, version=5) == {
        "reward": (1.0 + 0.0 + 0.5 + 0.5) / 4,
        "accuracy": 2 / 4,
        "length": (2 + 4 + 3 + 1) / 4,
        "length_max": 4.0,
        "truncated": 1 / 4,
        "groups_equal": 1 / 2,  # both of `words` have 0.5
        "sampled_tokens": 10.0,
        # A trajectory is as old as its first sampled token: 0, 0, 2, 1.
        "staleness_max": 2.0,
        "staleness/0": 2 / 4,
        "staleness/1": 1 / 4,
        "staleness/2": 1 / 4,
        "reward/sums": 0.5,
        "accuracy/sums": 0.5,
        "length/sums": 3.0,
        "reward/words": 0.5,
        "accuracy/words": 0.5,
        "length/words": 2.0,
        # Only over those that report it.
        "format": 0.5,
        "steps": 4.5,
    }


def test_all_is_plain_numbers_that_json_has(groups):
    assert {type(value) for value in of_rollout(groups, 5).values()} == {float}


def test_what_is_reported_under_a_name_of_ours_stands_beside_it():
    made = group("sums", 0, trajectory(0, 1, [0, 0], reward=1.0, metrics={"length": 99.0, "reward/sums": 7.0}))
    found = of_rollout([made], 0)
    assert (found["length"], found["reported/length"]) == (2.0, 99.0)
    assert (found["reward/sums"], found["reported/reward/sums"]) == (1.0, 7.0)


def test_nothing_usable_measures_nothing():
    assert of_rollout([], 3) == {}
    assert of_rollout([group("sums", 0, failed("sums", 0, 0))], 3) == {}


def test_an_episode_without_a_sampled_token_has_no_age():
    found = of_rollout([group("sums", 0, trajectory(0, 2, [], reward=1.0))], 3)
    assert (found["length"], found["staleness_max"]) == (0.0, 0.0)
    assert not any(name.startswith("staleness/") for name in found)


def test_updates_are_weighted_by_their_tokens():
    updates = [
        {"tokens": 30.0, "loss": 1.0, "grad_norm": 2.0, "kl": 0.1, "ratio_max": 1.5, "learning_rate": 1e-6},
        {"tokens": 10.0, "loss": 3.0, "grad_norm": 4.0, "kl": 0.5, "ratio_max": 1.2, "learning_rate": 2e-6},
    ]
    assert of_updates(updates) == {
        "trained_tokens": 40.0,
        "optimizer_steps": 2.0,
        "loss": 2.0,
        "grad_norm": 3.0,
        "kl": pytest.approx((0.1 * 30 + 0.5 * 10) / 40),
        "ratio_max": 1.5,
        "learning_rate": 2e-6,
    }


def test_skipped_updates_are_counted():
    updates = [{"tokens": 4.0, "skipped_updates": 1.0}, {"tokens": 4.0}, {"tokens": 4.0, "skipped_updates": 1.0}]
    assert of_updates(updates)["skipped_updates"] == 2.0


def test_a_step_that_trained_no_token():
    found = of_updates([{"tokens": 0.0, "loss": 0.0, "kl": 0.0}])
    assert found["trained_tokens"] == 0.0 and found["kl"] == 0.0
