"""Batches: every trajectory once, groups never separated, balance, determinism."""

import numpy as np
import pytest

from rollcli.data.batch import Batch
from rollcli.data.carriers import Group, Task, Trajectory


def trajectory(task: Task, sample: int, length: int, error: str | None = None) -> Trajectory:
    tokens = np.arange(length, dtype=np.int32) + 100 * task.index + 10 * sample
    mask = np.arange(length) >= 1
    return Trajectory(
        task.id, sample, tokens, mask, -tokens.astype(np.float32), np.where(mask, task.index, -1),
        reward=task.index + sample / 10, accuracy=float(sample), error=error,
    )  # fmt: skip


def batch_of(lengths: list[int]) -> Batch:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Batch(offsets, {"ids": np.arange(offsets[-1], dtype=np.int32)}, {"number": np.arange(len(lengths))})


def test_from_groups_keeps_groups_and_drops_failures() -> None:
    tasks = [Task("t", index, []) for index in range(3)]
    groups = [
        Group(tasks[0], [trajectory(tasks[0], 0, 3), trajectory(tasks[0], 1, 2, error="broke")]),
        Group(tasks[1], [Trajectory.failed(tasks[1], 0, "engine", "broke")]),
        Group(tasks[2], [trajectory(tasks[2], 0, 1), trajectory(tasks[2], 1, 4)]),
    ]
    batch = Batch.from_groups(groups)
    assert len(batch) == 3 and batch.lengths.tolist() == [3, 1, 4]
    assert batch.rows.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert batch.samples["group"].tolist() == [0, 1, 1]
    assert batch.samples["sample"].tolist() == [0, 0, 1]
    assert batch.samples["reward"].tolist() == [0.0, 2.0, 2.1]
    assert batch.tokens["ids"].tolist() == [0, 1, 2, 200, 210, 211, 212, 213]
    assert batch.tokens["loss_mask"].tolist() == [False, True, True, False, False, True, True, True]
    assert batch.tokens["versions"].tolist() == [-1, 0, 0, -1, -1, 2, 2, 2]
    assert {name: values.dtype.name for name, values in batch.tokens.items()} == {
        "ids": "int32", "loss_mask": "bool", "rollout_logprobs": "float32", "versions": "int32",
        "turns": "int32", "turn_rewards": "float64", "states": "int64",
    }  # fmt: skip
    assert batch.tokens["turns"].tolist() == [-1] * 8 and not batch.tokens["turn_rewards"].any()
    assert batch.samples["reward"].dtype == np.float64
    assert batch.samples["sampled"].tolist() == [2, 0, 3]
    assert np.isnan(batch.samples["greedy_reward"]).all()


def agent(task: Task, sample: int, keys: list[str], rewards: list[float], **more) -> Trajectory:
    """Two turns of two tokens and one, an observation of one token between: `. 0 0 . 1`."""
    mask = np.array([0, 1, 1, 0, 1], dtype=bool)
    return Trajectory(
        task.id, sample, np.arange(5, dtype=np.int32), mask, np.zeros(5, np.float32), np.zeros(5, np.int32),
        turns=[(1, 3), (4, 5)], turn_rewards=rewards, state_keys=keys, **more,
    )  # fmt: skip


def test_turns_their_rewards_and_their_states() -> None:
    tasks = [Task("t", index, []) for index in range(2)]
    groups = [
        Group(tasks[0], [agent(tasks[0], 0, ["start", "door"], [0.5, 1.0]), agent(tasks[0], 1, ["start", "wall"], [])]),
        Group(tasks[1], [agent(tasks[1], 0, ["door"], [2.0])]),
    ]
    batch = Batch.from_groups(groups)
    assert batch.tokens["turns"].tolist() == [-1, 0, 0, -1, 1] * 3
    assert batch.tokens["turn_rewards"].tolist() == [0, 0, 0.5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0]
    start, door, wall = batch.tokens["states"][[1, 4, 9]]
    assert len({start, door, wall}) == 3 and min(start, door, wall) >= 0
    assert batch.tokens["states"].tolist() == [
        -1, start, start, -1, door, -1, start, start, -1, wall, -1, door, door, -1, -1,
    ]  # fmt: skip


def test_what_was_left_of_the_budget_and_the_greedy_answer() -> None:
    tasks = [Task("t", index, []) for index in range(2)]
    cut = agent(tasks[0], 0, [], [], budget=3, stop_reason="length")
    ended = agent(tasks[1], 0, [], [], budget=9, stop_reason="stop")
    greedy = agent(tasks[0], 1, [], [], reward=0.25)
    batch = Batch.from_groups([Group(tasks[0], [cut], [greedy]), Group(tasks[1], [ended])])
    assert len(batch) == 2, "the greedy answer is not trained on"
    assert batch.samples["budget"].tolist() == [3, 9] and batch.samples["sampled"].tolist() == [3, 3]
    assert batch.samples["truncated"].tolist() == [True, False]
    assert batch.samples["greedy_reward"][0] == 0.25 and np.isnan(batch.samples["greedy_reward"][1])


def test_means_of_groups_reach_every_member_in_any_order() -> None:
    batch = batch_of([1, 0, 2, 1, 1])
    batch.samples |= {"group": np.array([7, -2, 7, 7, -2]), "accuracy": np.array([1.0, 0.5, 0.0, 0.5, 1.0])}
    assert batch.group_means("accuracy").tolist() == [0.5, 0.75, 0.5, 0.5, 0.75]
    assert batch.select(np.array([], dtype=np.int64)).group_means("accuracy").shape == (0,)


def test_trained_lengths_follow_the_mask() -> None:
    batch = batch_of([2, 0, 3])
    batch.tokens["loss_mask"] = np.array([False, True, True, True, False])
    assert batch.trained_lengths.tolist() == [1, 0, 2] and batch.trained_lengths.dtype == np.int64


def test_columns_of_a_whole_vocabulary_are_selected_and_gathered() -> None:
    batch = batch_of([2, 1, 3])
    batch.tokens["distribution"] = np.arange(24, dtype=np.float32).reshape(6, 4)
    assert batch.select(np.array([2, 1])).tokens["distribution"][:, 0].tolist() == [12, 16, 20, 8]
    shards = batch.shards(2)
    parts = [batch.select(shard).tokens["distribution"] for shard in shards]
    assert np.array_equal(batch.gather(shards, parts), batch.tokens["distribution"])


def test_equal_task_ids_of_two_groups_stay_two_groups() -> None:
    task = Task("t", 0, [])
    batch = Batch.from_groups([Group(task, [trajectory(task, 0, 2)]), Group(task, [trajectory(task, 0, 2)])])
    assert batch.samples["group"].tolist() == [0, 1]


def test_no_usable_trajectory_is_an_empty_batch() -> None:
    batch = Batch.from_groups([])
    assert len(batch) == 0 and batch.tokens["ids"].shape == (0,) and batch.rows.shape == (0,)
    assert batch.select(np.array([], dtype=np.int64)).tokens["ids"].shape == (0,)


def test_select_moves_columns_together() -> None:
    batch = batch_of([2, 0, 3, 1])
    picked = batch.select(np.array([3, 2, 1, 2]))
    assert picked.lengths.tolist() == [1, 3, 0, 3]
    assert picked.tokens["ids"].tolist() == [5, 2, 3, 4, 2, 3, 4]
    assert picked.samples["number"].tolist() == [3, 2, 1, 2]


def test_nine_samples_over_two_shards() -> None:
    batch = batch_of([9, 1, 8, 2, 7, 3, 6, 4, 5])
    shards = batch.shards(2)
    assert sorted(np.concatenate(shards).tolist()) == list(range(9))
    loads = [int(batch.lengths[shard].sum()) for shard in shards]
    assert abs(loads[0] - loads[1]) <= 1 and sum(loads) == 45
    assert all(shard.tolist() == sorted(shard) for shard in shards)
    assert [shard.tolist() for shard in batch.shards(2)] == [shard.tolist() for shard in shards]


def test_more_shards_than_samples_and_gathering_them() -> None:
    batch = batch_of([2, 3])
    shards = batch.shards(4)
    assert sorted(len(shard) for shard in shards) == [0, 0, 1, 1]
    parts = [batch.select(shard).tokens["ids"] for shard in shards]
    assert batch.gather(shards, parts).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_gather_undoes_shards(count: int) -> None:
    lengths = np.random.default_rng(count).integers(0, 12, size=20).tolist()
    batch = batch_of(lengths)
    shards = batch.shards(count)
    parts = [batch.select(shard).tokens["ids"].astype(np.float32) / 7 for shard in shards]
    gathered = batch.gather(shards, parts)
    assert gathered.dtype == np.float32
    assert np.array_equal(gathered, batch.tokens["ids"].astype(np.float32) / 7)


@pytest.mark.parametrize(("size", "count"), [(10, 1), (10, 2), (10, 3), (10, 4), (9, 2), (3, 5)])
def test_minibatches_hold_every_sample_once(size: int, count: int) -> None:
    parts = batch_of(list(range(1, size + 1))).minibatches(count, seed=3)
    numbers = [part.samples["number"].tolist() for part in parts]
    assert sorted(number for part in numbers for number in part) == list(range(size))
    sizes = [len(part) for part in parts]
    assert len(sizes) == min(count, size) and max(sizes) - min(sizes) <= 1
    for part in parts:
        assert part.tokens["ids"].tolist() == [
            token for number in part.samples["number"] for token in range(number * (number + 1) // 2,
                                                                          (number + 1) * (number + 2) // 2)
        ]  # fmt: skip


def test_minibatches_are_deterministic_and_each_has_short_and_long() -> None:
    batch = batch_of([1] * 8 + [100] * 8)
    first, again, other = (batch.minibatches(4, seed) for seed in (0, 0, 1))
    numbers = [[part.samples["number"].tolist() for part in parts] for parts in (first, again, other)]
    assert numbers[0] == numbers[1] != numbers[2]
    for part in [*first, *other]:
        assert sorted(part.lengths.tolist()) == [1, 1, 100, 100]


def test_from_sequences() -> None:
    batch = Batch.from_sequences([(np.array([5, 6]), np.array([0, 1])), (np.array([7]), np.array([0]))])
    assert batch.lengths.tolist() == [2, 1] and batch.tokens["ids"].tolist() == [5, 6, 7]
    assert batch.tokens["loss_mask"].tolist() == [False, True, False] and batch.samples == {}


def test_joined_parts_are_the_batch_again_with_the_columns_all_have():
    batch = Batch(
        np.array([0, 2, 2, 5]), {"ids": np.arange(5), "loss_mask": np.ones(5, bool)}, {"group": np.array([0, 1, 1])}
    )
    parts = [batch.select(np.array([0, 1])), batch.select(np.array([2]))]
    parts[0].tokens["more"] = np.zeros(2)
    whole = Batch.joined(parts)
    assert whole.offsets.tolist() == batch.offsets.tolist() and set(whole.tokens) == {"ids", "loss_mask"}
    assert whole.tokens["ids"].tolist() == list(range(5)) and whole.samples["group"].tolist() == [0, 1, 1]
    assert len(Batch.joined([])) == 0


def test_images_stay_with_their_trajectories() -> None:
    def seen(number: int) -> dict[str, np.ndarray]:
        return {"pixel_values": np.full((2, 3), number), "image_grid_thw": np.array([[1, 1, 2]])}

    tasks = [Task("t", index, []) for index in range(3)]
    groups = [Group(task, [trajectory(task, sample, 3) for sample in range(2)]) for task in tasks]
    assert Batch.from_groups(groups).images is None
    for number in (0, 2):
        for each in groups[number].trajectories:
            each.images = seen(number)
    batch = Batch.from_groups(groups)
    assert batch.images[0] is batch.images[1] and batch.images[2:4] == [None, None]
    picked = batch.select(np.array([5, 2, 0]))
    assert [image and image["pixel_values"][0, 0] for image in picked.images] == [2, None, 0]
    assert batch.select(np.array([2, 3])).images is None
    joined = Batch.joined([batch.select(np.array([2])), picked])
    assert [image and image["pixel_values"][0, 0] for image in joined.images] == [None, 2, None, 0]
    demonstrations = Batch.from_sequences([(np.arange(2), np.arange(2) > 0)] * 2, [None, seen(1)])
    assert demonstrations.images[1]["pixel_values"][0, 0] == 1
