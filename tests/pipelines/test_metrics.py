"""Every number worked out by hand, or by a slow reference."""

import math

import numpy as np
import pytest

from rollcli.algorithms.correction import Correction
from rollcli.data.batch import Batch
from rollcli.pipelines.metrics import of_critic, of_gap, of_reference, of_rollout, of_updates
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
        "skipped_updates": 0.0,
        "loss": 2.0,
        "grad_norm": 3.0,
        "kl": pytest.approx((0.1 * 30 + 0.5 * 10) / 40),
        "ratio_max": 1.5,
        "learning_rate": 2e-6,
    }


def test_skipped_updates_are_counted():
    updates = [{"tokens": 4.0, "skipped_updates": 1.0}, {"tokens": 4.0}, {"tokens": 4.0, "skipped_updates": 1.0}]
    assert of_updates(updates)["skipped_updates"] == 2.0


def test_a_skipped_updates_numbers_say_nothing():
    bad = {"tokens": 4.0, "skipped_updates": 1.0, "loss": float("nan"), "kl": float("nan"), "grad_norm": float("inf")}
    good = {"tokens": 4.0, "skipped_updates": 0.0, "loss": 1.0, "kl": 0.5, "grad_norm": 2.0}
    found = of_updates([good, bad])
    assert (found["loss"], found["kl"], found["grad_norm"]) == (1.0, 0.5, 2.0)
    assert (found["optimizer_steps"], found["skipped_updates"], found["trained_tokens"]) == (2.0, 1.0, 4.0)


def column_batch(**tokens):
    count = len(next(iter(tokens.values())))
    columns = {name: np.array(values, dtype=np.float32) for name, values in tokens.items() if name != "loss_mask"}
    return Batch(np.array([0, count]), {**columns, "loss_mask": np.array(tokens["loss_mask"], dtype=bool)})


def test_kl_to_the_reference_is_of_the_policy_before_its_updates():
    first = column_batch(updated_policy=[9, -1], old_logprobs=[9, 5], reference_logprobs=[0, -2], loss_mask=[0, 1])
    later = column_batch(updated_policy=[9, 9], old_logprobs=[-1, -3], reference_logprobs=[-1, -2], loss_mask=[1, 1])
    k3 = [math.exp(-1) - 1 + 1, 0.0, math.exp(1) - 1 - 1]
    assert of_reference([first, later]) == {"kl_reference": pytest.approx(sum(k3) / 3)}
    del first.tokens["reference_logprobs"]
    assert of_reference([first]) == of_reference([]) == {}


def test_explained_variance_of_the_critic():
    batch = column_batch(returns=[1, 3, 5, 77], values=[1, 2, 6, 0], loss_mask=[1, 1, 1, 0])
    errors = np.array([0.0, 1.0, -1.0])
    assert of_critic(batch)["critic/explained_variance"] == pytest.approx(1 - errors.var() / np.var([1, 3, 5]))
    assert of_critic(column_batch(returns=[2, 2], values=[1, 0], loss_mask=[1, 1])) == {}
    assert of_critic(Batch.joined([])) == {}


def test_a_step_that_trained_no_token():
    found = of_updates([{"tokens": 0.0, "loss": 0.0, "kl": 0.0}])
    assert found["trained_tokens"] == 0.0 and found["kl"] == 0.0


VERSION = 5


def gapped(seed: int, versions: tuple[int, ...] = (3, 4, 5)) -> list[Batch]:
    """Two minibatches of random log-probabilities: the first as the update scored it, the second as the old policy."""
    random = np.random.default_rng(seed)
    made = []
    for number, column in enumerate(("updated_policy", "old_logprobs")):
        members = [
            trajectory(sample, 2, [int(v) for v in random.choice(versions, random.integers(1, 6))], reward=1.0)
            for sample in range(4)
        ]
        batch = Batch.from_groups([group("sums", number, *members)])
        batch.tokens["rollout_logprobs"] = random.normal(-1, 1, len(batch.tokens["ids"])).astype(np.float32)
        batch.tokens[column] = random.normal(-1, 1, len(batch.tokens["ids"])).astype(np.float32)
        # What stands off the mask means nothing and must count nowhere.
        batch.tokens[column][~batch.tokens["loss_mask"]] = np.nan
        made.append(batch)
    return made


def slow_gap(batches: list[Batch], low: float, high: float, level: str, age: int | None = None) -> dict[str, float]:
    """Token by token, from the definitions."""
    found: list[tuple[float, bool]] = []
    for batch, column in zip(batches, ("updated_policy", "old_logprobs"), strict=True):
        for row in range(len(batch)):
            places = [p for p in range(batch.offsets[row], batch.offsets[row + 1]) if batch.tokens["loss_mask"][p]]
            differences = [
                float(batch.tokens[column][p] - batch.tokens["rollout_logprobs"][p]) for p in places
            ]  # fmt: skip
            for place, difference in zip(places, differences, strict=True):
                total = {"token": difference, "sequence": sum(differences)}.get(level, sum(differences) / len(places))
                if age in (None, VERSION - batch.tokens["versions"][place]):
                    found.append((difference, not low <= math.exp(total) <= high))
    weights = [math.exp(difference) for difference, _ in found]
    return {
        "rollout_gap_mean": sum(abs(difference) for difference, _ in found) / len(found),
        "rollout_gap_max": max(abs(difference) for difference, _ in found),
        "rollout_kl": sum(math.exp(d) - 1 - d for d, _ in found) / len(found),
        "rollout_ess": sum(weights) ** 2 / (len(found) * sum(weight**2 for weight in weights)),
        "rollout_clipped": sum(outside for _, outside in found) / len(found),
    }


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("seed", range(3))
def test_the_gap_over_all_and_by_staleness(seed, level):
    batches = gapped(seed)
    measured = of_gap(batches, VERSION, Correction("mask", level, low=0.5, high=1.5))
    expected = slow_gap(batches, 0.5, 1.5, level)
    for age in (0, 1, 2):
        expected |= {f"{name}/{age}": v for name, v in slow_gap(batches, 0.5, 1.5, level, age).items()}
    assert measured == pytest.approx(expected, rel=1e-5) and 0 < measured["rollout_clipped"] < 1
    assert {type(value) for value in measured.values()} == {float}


def test_a_gap_of_one_age_is_said_once():
    measured = of_gap(gapped(0, (4,)), VERSION, Correction("mask", low=0.5, high=1.5))
    assert set(measured) == {"rollout_gap_mean", "rollout_gap_max", "rollout_kl", "rollout_ess", "rollout_clipped"}


def test_no_gap_is_zero_with_every_sample_effective():
    batches = gapped(0)
    for batch, column in zip(batches, ("updated_policy", "old_logprobs"), strict=True):
        batch.tokens[column] = batch.tokens["rollout_logprobs"].copy()
    measured = of_gap(batches, VERSION, Correction("mask", low=0.5))
    assert measured["rollout_gap_max"] == measured["rollout_kl"] == measured["rollout_clipped"] == 0
    assert measured["rollout_ess"] == pytest.approx(1.0)


def test_a_gap_without_bounds_clips_nothing():
    # An algorithm of one's own may have no correction.
    measured = of_gap(gapped(0), VERSION, None)
    assert measured["rollout_clipped"] == 0 and measured["rollout_gap_mean"] > 0


def test_an_impossible_token_leaves_the_gap_finite():
    batches = gapped(0)
    batches[0].tokens["rollout_logprobs"][batches[0].tokens["loss_mask"]] = -900.0
    measured = of_gap(batches, VERSION, Correction("truncate"))
    assert measured["rollout_gap_max"] > 800 and all(map(math.isfinite, measured.values()))


def test_what_nobody_scored_has_no_gap():
    batches = gapped(0)
    del batches[0].tokens["updated_policy"], batches[1].tokens["old_logprobs"]
    assert of_gap(batches, VERSION, None) == of_gap([], VERSION, None) == {}
    # While a critic warms up the policy scores nothing itself: the old policy's log-probabilities remain.
    warm = gapped(0)
    del warm[0].tokens["updated_policy"]
    alone = gapped(0)[1]
    alone.tokens["updated_policy"] = alone.tokens["old_logprobs"]
    assert of_gap(warm, VERSION, None) == of_gap([alone], VERSION, None) != {}


def test_the_greedy_answer_is_measured_beside_the_others(groups):
    assert "greedy_reward" not in of_rollout(groups, 5)
    for made, reward in zip(groups, (1.0, 0.0), strict=True):
        made.greedy = [trajectory(9, 1, [5, 5, 5], reward=reward)]
    found = of_rollout(groups, 5)
    assert found["greedy_reward"] == 0.5 and (found["length"], found["sampled_tokens"]) == (2.5, 10.0)
