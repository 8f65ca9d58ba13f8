"""The mixed stream of tasks: pure, exact, resumable."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from rollcli.config.schema import TaskConfig
from rollcli.data.samplers import UNSEEN, weights
from rollcli.data.samplers import weighted as weighted_draw
from rollcli.data.sources.base import Problem
from rollcli.data.stream import TaskSequence, TaskStream, derive_seed
from rollcli.errors import CheckpointError, ConfigError


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


def config(
    name: str = "a", weight: float = 1.0, system: str | None = None, sampler: str = "uniform", **options
) -> TaskConfig:
    return TaskConfig(name, Numbers(**options), weight=weight, system=system, sampler=sampler)


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
    for mix in mixes:
        stream = weighted(mix)
        shares = np.array(mix) / sum(mix)
        for total in range(1, 1001):
            stream.draw()
            assert np.abs(np.array(stream.counts) - shares * total).max() <= 1 + 1e-9, (mix, total)
        assert sum(stream.counts) == 1000


def test_the_papers_mix_is_exact_over_a_thousand_draws_and_goes_on_after_a_resume() -> None:
    stream = weighted([0.4, 0.3, 0.3])
    drawn = [stream.draw() for _ in range(1000)]
    assert stream.counts == [400, 300, 300]
    assert [task.index for task in drawn if task.name == "t0"] == list(range(400))
    again = weighted([0.4, 0.3, 0.3])
    for _ in range(517):
        again.draw()
    resumed = weighted([0.4, 0.3, 0.3])
    resumed.restore(json.loads(json.dumps(again.state())))
    assert [resumed.draw() for _ in range(483)] == drawn[517:]


def test_a_task_of_weight_0_is_never_drawn() -> None:
    stream = weighted([1, 0, 1])
    assert {stream.draw().name for _ in range(100)} == {"t0", "t2"} and set(stream.state()) == {"t0", "t2"}


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
    assert all(set(saved) == {"drawn", "fingerprint", "pass_rates"} for saved in state.values())
    assert all(isinstance(saved["drawn"], int) for saved in state.values()) and state["c"]["pass_rates"] is None
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


def test_a_task_knows_its_row_and_comes_again_by_it() -> None:
    tasks = [config("a", count=5), config("b", 0.4, count=None), config("c", count=9, sampler="difficulty")]
    stream = TaskStream(tasks, 3)
    seen = [stream.draw() for _ in range(40)]
    assert all(task.row == task.payload["row"] for task in seen)
    # Whatever was learned meanwhile: a draw that was made stays what it was.
    stream.learn((task, 0.9) for task in seen)
    assert [stream.task(task.name, task.index, task.row) for task in seen] == seen
    assert stream.counts == [sum(task.name == name for task in seen) for name in "abc"]


def test_the_uniform_sampler_learns_and_draws_as_if_it_did_not() -> None:
    plain, learning = TaskStream([config(count=11)], 5), TaskStream([config(count=11)], 5)
    rows = []
    for number in range(40):
        task = learning.draw(number / 40)
        rows.append(task.row)
        learning.learn([(task, float(number % 2))])
    assert rows == [plain.draw().row for _ in range(40)]
    sequence = learning.sequences[0]
    expected = [np.random.default_rng([sequence.seed, n // 11]).permutation(11)[n % 11] for n in range(40)]
    assert rows == expected and sequence.pass_rates.counts.sum() == 40


@pytest.mark.parametrize("sampler", ["difficulty", "curriculum"])
def test_a_sampler_by_pass_rate_draws_by_the_rates_of_that_moment(sampler: str) -> None:
    stream = TaskStream([config(count=30, sampler=sampler)], 2)
    sequence, rates = stream.sequences[0], np.full(30, UNSEEN)
    for number in range(60):
        progress = number / 60
        expected = weighted_draw(sequence.seed, number, weights(sampler, rates, progress).cumsum())
        task = stream.draw(progress)
        assert task.row == expected and task.index == number
        stream.learn([(task, (task.row % 5) / 4)])
        rates = sequence.pass_rates.rates.copy()
    # The same row drawn again is another instance: its samples are seeded anew.
    assert len({sequence.task(index, 3).seed for index in range(5)}) == 5


def test_difficulty_prefers_problems_that_are_sometimes_solved() -> None:
    stream = TaskStream([config(count=10, sampler="difficulty")], 0)
    for _ in range(3):
        stream.learn((stream.task("a", 0, row), 0.5 if row < 3 else float(row % 2)) for row in range(10))
    rows = [stream.draw().row for _ in range(300)]
    # 3 × 0.27 against 7 × 0.02 of weight.
    assert sum(row < 3 for row in rows) / 300 == pytest.approx(0.81 / 0.95, abs=0.07)


def test_a_curriculum_draws_easy_ones_first() -> None:
    stream = TaskStream([config(count=10, sampler="curriculum")], 0)
    stream.learn((stream.task("a", 0, row), row / 9) for row in range(10))
    easy = [stream.draw(0.0).row for _ in range(200)]
    hard = [stream.draw(1.0).row for _ in range(200)]
    assert np.mean(easy) > 6 and np.mean(hard) < 3


def test_what_is_learned_of_an_endless_source_is_nothing() -> None:
    stream = TaskStream([config(count=None)], 0)
    stream.learn([(stream.draw(), 1.0)])
    assert stream.state()["a"]["pass_rates"] is None


@pytest.mark.parametrize("sampler", ["difficulty", "curriculum"])
@pytest.mark.parametrize("at", [0, 7, 31])
def test_draws_by_pass_rate_repeat_after_a_restore(sampler: str, at: int) -> None:
    tasks = [config("a", count=12, sampler=sampler), config("b", 0.5, count=5), config("c", 0.3, count=None)]

    def go(stream: TaskStream, start: int, end: int) -> list[tuple]:
        seen = []
        for number in range(start, end):
            task = stream.draw(number / 60)
            seen.append((task.id, task.row, task.seed))
            stream.learn([(task, (task.row * 7 % 5) / 4)])
        return seen

    whole, first, second = TaskStream(tasks, 1), TaskStream(tasks, 1), TaskStream(tasks, 1)
    expected = go(whole, 0, 60)
    assert go(first, 0, at) == expected[:at]
    second.restore(json.loads(json.dumps(first.state())))
    assert go(second, at, 60) == expected[at:]
    assert json.dumps(second.state()) == json.dumps(whole.state())


@pytest.mark.parametrize("sampler", ["difficulty", "curriculum"])
def test_a_sampler_by_pass_rate_of_an_endless_source_is_refused(sampler: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TaskStream([config("plain"), config("made", sampler=sampler, count=None)], 0)
    assert caught.value.message == (
        f"task `made` has `sampler: {sampler}`, which goes by the pass rate of each problem, but its source makes new "
        "problems without end: none comes twice"
    )
    assert "sampler: uniform" in caught.value.hint
    # Held-out problems come in order, whatever the sampler.
    assert TaskSequence(config("made", sampler=sampler, count=None), "test", 0)[3].row == 3
    assert [TaskSequence(config(sampler=sampler), "test", 0)[n].row for n in range(9)] == [*range(7), 0, 1]
