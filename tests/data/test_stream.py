"""The mixed stream of tasks: pure, exact, resumable."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from rollcli.config.schema import TaskConfig
from rollcli.data.sources.base import Problem
from rollcli.data.stream import TaskSequence, TaskStream, derive_seed
from rollcli.errors import CheckpointError


@dataclass
class Numbers:
    """A source of `count` numbers, or of endless ones."""

    count: int | None = 7
    content: str = "numbers"

    def open(self, split: str, seed: int) -> NumberItems:
        return NumberItems(self, split)


class NumberItems:
    def __init__(self, source: Numbers, split: str) -> None:
        self.size, self.fingerprint, self.split = source.count, source.content, split

    def __getitem__(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": f"{self.split} {index}"}], {"row": index})


def config(name: str = "a", weight: float = 1.0, system: str | None = None, **options) -> TaskConfig:
    return TaskConfig(name, Numbers(**options), weight=weight, system=system)


def drawn(stream: TaskStream, count: int) -> list[tuple]:
    return [(task.id, task.payload["row"], task.seed, task.messages[-1]["content"])
            for task in (stream.draw() for _ in range(count))]  # fmt: skip


def test_seeds_depend_on_every_part_and_on_no_process() -> None:
    assert derive_seed(1, "a") == derive_seed("1", "a")
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed(1, "2", 3), derive_seed(2, 13)}) == 4
    assert 0 <= derive_seed("x") < 2**63
    code = "from rollcli.data.stream import derive_seed; print(derive_seed(0, 'math', 5))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert int(shown) == derive_seed(0, "math", 5)


def test_a_draw_is_a_pure_function_of_seed_name_and_number() -> None:
    sequence = TaskSequence(config(), "train", 3)
    forward = [sequence[index] for index in range(30)]
    other = TaskSequence(config(), "train", 3)
    backward = [other[index] for index in reversed(range(30))][::-1]
    assert forward == backward
    assert [t.payload["row"] for t in forward] != [
        TaskSequence(config(), "train", 4)[i].payload["row"] for i in range(30)
    ]
    assert [t.payload["row"] for t in forward] != [
        TaskSequence(config("b"), "train", 3)[i].payload["row"] for i in range(30)
    ]
    assert len({task.seed for task in forward}) == 30


def test_epochs_are_permutations_in_another_order_each() -> None:
    sequence = TaskSequence(config(count=11), "train", 0)
    epochs = [[sequence[11 * epoch + place].payload["row"] for place in range(11)] for epoch in range(5)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_endless_sources_are_read_in_their_own_order() -> None:
    sequence = TaskSequence(config(count=None), "train", 0)
    assert [sequence[index].payload["row"] for index in (0, 5, 10**9)] == [0, 5, 10**9]


def test_the_test_split_is_in_order_and_has_seeds_of_its_own() -> None:
    held_out, train = TaskSequence(config(), "test", 0), TaskSequence(config(), "train", 0)
    assert [held_out[index].payload["row"] for index in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert held_out[0].messages[0]["content"] == "test 0"
    assert not {held_out[i].seed for i in range(50)} & {train[i].seed for i in range(50)}


def test_system_message_comes_first_and_touches_no_other_task() -> None:
    sequence = TaskSequence(config(system="Be brief."), "test", 0)
    for _ in range(2):
        assert sequence[0].messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "test 0"},
        ]


def weighted(weights) -> TaskStream:
    return TaskStream([config(f"t{place}", weight) for place, weight in enumerate(weights)], 0)


def test_shares_are_exact_to_one_item_after_any_number_of_draws() -> None:
    random = np.random.default_rng(0)
    mixes = [[1], [1, 1], [3, 1], [0.7, 0.2, 0.1], [1, 1, 1], [1000, 1]]
    mixes += [random.dirichlet(np.full(size, 0.5)).tolist() for size in range(2, 13) for _ in range(3)]
    # Taking the task furthest behind its share would be 1.04 off here, after 18 draws.
    mixes += [[2, 2, 11, 8, 11, 2, 2, 11]]
    for weights in mixes:
        stream = weighted(weights)
        shares = np.array(weights) / sum(weights)
        for total in range(1, 1001):
            stream.draw()
            assert np.abs(np.array(stream.counts) - shares * total).max() <= 1 + 1e-9, (weights, total)
        assert sum(stream.counts) == 1000


def test_two_equal_tasks_take_turns() -> None:
    stream = weighted([1, 1])
    assert [stream.draw().name for _ in range(6)] == ["t0", "t1"] * 3


def test_draws_of_a_task_do_not_depend_on_the_mix() -> None:
    alone, mixed = TaskStream([config()], 0), TaskStream([config(), config("b", 2.5)], 0)
    assert drawn(alone, 40)[:11] == [draw for draw in drawn(mixed, 40) if draw[0].startswith("a/")][:11]


@pytest.mark.parametrize("at", [0, 1, 5, 10, 23, 29])
def test_restored_stream_goes_on_as_if_never_interrupted(at: int) -> None:
    tasks = [config("a", 0.7, count=5), config("b", 0.2, count=3), config("c", 0.1, count=None)]
    whole = drawn(TaskStream(tasks, 9), 40)
    first = TaskStream(tasks, 9)
    assert drawn(first, at) == whole[:at]
    state = json.loads(json.dumps(first.state()))
    assert all(set(saved) == {"drawn", "fingerprint"} and isinstance(saved["drawn"], int) for saved in state.values())
    second = TaskStream(tasks, 9)
    second.restore(state)
    assert drawn(second, 40 - at) == whole[at:]
    assert len({draw[0] for draw in whole}) == 40


def test_the_order_of_tasks_in_the_recipe_may_change() -> None:
    stream = TaskStream([config("a"), config("b", 3)], 0)
    drawn(stream, 10)
    turned = TaskStream([config("b", 3), config("a")], 0)
    turned.restore(stream.state())
    assert turned.counts == stream.counts[::-1]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([("a", "numbers"), ("b", "others")], "task `b` has other data than the checkpoint: was numbers, is others"),
        ([("a", "numbers"), ("b", "numbers"), ("c", "numbers")], "task `c`.*was absent"),
        ([("b", "numbers")], "has a task `a` that the recipe does not have"),
    ],
)
def test_other_data_is_refused_and_nothing_is_moved(tasks: list[tuple[str, str]], message: str) -> None:
    saved = TaskStream([config("a"), config("b")], 0)
    drawn(saved, 6)
    stream = TaskStream([config(name, content=content) for name, content in tasks], 0)
    with pytest.raises(CheckpointError, match=message) as caught:
        stream.restore(saved.state())
    assert caught.value.hint
    assert stream.counts == [0] * len(tasks)
