"""The bound on how far sampling runs ahead: proved in the module, tried here on every order of events."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from rollcli.rollout.admission import Admission


def admitted(admission: Admission, start: int = 0) -> list[int]:
    """Fills the room and returns the numbers."""
    numbers = list(range(start, start + admission.room()))
    for number in numbers:
        admission.admit(number)
    return numbers


def test_synchronous_room_is_one_batch_while_it_is_collected_and_none_while_it_is_trained():
    admission = Admission(4, 0, None, 10)
    assert admitted(admission) == [0, 1, 2, 3] and admission.room() == 0
    assert admission.batch([2, 0, 3]) is None
    assert admission.batch([3, 2, 1, 0]) == [0, 1, 2, 3]
    admission.take([0, 1, 2, 3])
    assert admission.room() == 0
    admission.version = 1
    assert admission.room() == 4


@pytest.mark.parametrize(("staleness", "extra", "before", "while_training"), [
    (1, None, 8, 4), (2, None, 12, 8), (2, 0, 4, 4), (2, 3, 7, 7), (2, 8, 12, 8), (1, 4, 8, 4),
])  # fmt: skip
def test_room_by_hand(staleness, extra, before, while_training):
    admission = Admission(4, staleness, extra, 100)
    assert admission.room() == before
    admitted(admission)
    admission.take(admission.batch(range(before)))
    # Groups that wait and groups that may be admitted, together, while the policy is trained.
    assert before - 4 + admission.room() == while_training


def test_a_resumed_run_has_the_room_of_its_own_step():
    admission = Admission(4, 2, None, 1000)
    admission.version = admission.next_step = 100
    assert admission.room() == 12


def test_nothing_is_admitted_that_no_step_would_train():
    admission = Admission(4, 3, None, 2)
    assert len(admitted(admission)) == 8
    admission.take(admission.batch(range(8)))
    assert admission.room() == 0
    admission.version = 1
    assert admission.room() == 0
    admission.take(admission.batch(range(4, 8)))
    assert admission.room() == 0


def test_a_withdrawn_group_makes_room_for_one():
    admission = Admission(3, 1, None, 10)
    assert admitted(admission) == list(range(6))
    admission.withdraw(2)
    assert admission.room() == 1


def test_extra_groups_of_a_synchronous_batch():
    admission = Admission(4, 0, 3, 10)
    assert len(admitted(admission)) == 7
    assert admission.batch([6, 5, 3, 1]) == [1, 3, 5, 6]
    admission.take([1, 3, 5, 6])
    for number in (0, 2, 4):
        admission.withdraw(number)
    assert admission.room() == 0


def test_a_batch_waits_for_a_group_that_would_be_overdue():
    admission = Admission(2, 1, None, 10)
    assert admitted(admission) == [0, 1, 2, 3]  # due at step 1
    # Step 1 can train two of them: any two may go now.
    assert admission.batch([2, 3]) == [2, 3]
    admission.take([2, 3])
    admission.version = 1
    assert admitted(admission, 4) == [4, 5]  # due at step 2
    # 0 and 1 must go now; 4 and 5 alone will not do.
    assert admission.batch([4, 5]) is None
    assert admission.batch([0, 4, 5]) is None
    assert admission.batch([0, 1, 4, 5]) == [0, 1]


class Run:
    """A run in which chance decides what happens next; every rule of the claim is checked as it goes."""

    def __init__(
        self, chance: random.Random, per_step: int, staleness: int, extra: int | None, steps: int, refusals: float
    ) -> None:
        self.chance, self.per_step, self.staleness, self.steps, self.refusals = (
            chance, per_step, staleness, steps, refusals
        )  # fmt: skip
        self.admission = Admission(per_step, staleness, extra, steps)
        self.born: dict[int, int] = {}
        self.running: set[int] = set()
        self.finished: set[int] = set()
        self.trained: dict[int, int] = {}
        self.refused: set[int] = set()
        self.most = 0

    def admit(self) -> None:
        for _ in range(self.admission.room()):
            number = len(self.born)
            self.born[number] = self.admission.version
            self.admission.admit(number)
            self.running.add(number)
        self.most = max(self.most, len(self.running) + len(self.finished))

    def finish(self) -> None:
        """One group ends, and is refused or kept."""
        number = self.chance.choice(sorted(self.running))
        self.running.remove(number)
        if self.chance.random() < self.refusals:
            self.refused.add(number)
            self.admission.withdraw(number)
            self.admit()
        else:
            self.finished.add(number)

    def step(self, number: int) -> None:
        self.admission.version = number
        self.admit()
        while (batch := self.admission.batch(self.finished)) is None:
            assert self.running, f"deadlock before step {number}"
            self.finish()
        assert len(batch) == self.per_step and batch == sorted(batch)
        for group in batch:
            assert number - self.born[group] <= self.staleness
            self.finished.remove(group)
            assert self.trained.setdefault(group, number) == number
        self.admission.take(batch)
        self.admit()
        for _ in range(self.chance.choice([0, 1, self.per_step, 10 * self.per_step])):  # training takes a while
            if self.running:
                self.finish()

    def play(self) -> None:
        for number in range(self.steps):
            self.step(number)
        assert len(self.trained) == self.steps * self.per_step
        assert not self.running and not self.finished, "something admitted was never trained"
        assert set(self.born) == set(self.trained) | self.refused


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_nothing_is_too_old_and_nothing_is_lost(seed):
    chance = random.Random(seed)
    per_step, staleness = chance.randint(1, 6), chance.randint(0, 5)
    extra = chance.choice([None, None, *range(staleness * per_step + 1)]) if staleness else None
    refusals = chance.choice([0.0, 0.0, 0.3, 0.8])
    run = Run(chance, per_step, staleness, extra, 25, refusals)
    run.play()
    most = per_step * (1 + staleness) if extra is None else per_step + extra
    assert run.most == min(most, 25 * per_step)


@pytest.mark.parametrize("seed", range(10))
def test_synchronous_batches_are_exactly_those_admitted(seed):
    run = Run(random.Random(seed), 4, 0, None, 10, 0.5)
    run.play()
    assert all(run.born[number] == step for number, step in run.trained.items())


@pytest.mark.parametrize(("per_step", "staleness", "steps"), [(1, 1, 5), (1, 2, 5), (2, 1, 3), (1, 3, 4), (2, 2, 3)])
def test_every_order_of_endings_of_small_runs_keeps_the_bound(per_step, staleness, steps):
    """Every choice of which group ends next, and of how many end while the policy is trained."""
    ends = 0

    def explore(at: int, due: dict[int, int], version: int, running: frozenset, finished: frozenset, born: int) -> None:
        nonlocal ends
        key = (at, version, running, finished, born, tuple(sorted(due.items())))
        if key in seen:
            return
        seen.add(key)
        admission = Admission(per_step, staleness, None, steps)
        admission.version, admission.next_step, admission._due = version, at, dict(due)
        for number in range(born, born + admission.room()):
            admission.admit(number)
            running, born = running | {number}, born + 1
        for number in running:  # whichever ends next
            explore(at, dict(admission._due), version, running - {number}, finished | {number}, born)
        if version < at:  # the policy is trained: it may be done at any moment
            explore(at, dict(admission._due), version + 1, running, finished, born)
            return
        batch = admission.batch(finished)
        if at == steps:
            ends += 1
            assert not running and not finished
            return
        assert batch is not None or running, "deadlock"
        if batch is not None:
            assert all(admission._due[number] >= at for number in batch), "overdue"
            admission.take(batch)
            explore(at + 1, dict(admission._due), version, running, finished - set(batch), born)

    seen: set = set()
    explore(0, {}, 0, frozenset(), frozenset(), 0)
    assert ends >= 1 and len(seen) > 20


@pytest.mark.parametrize(("per_step", "steps_left"), [(1, 3), (2, 3), (3, 2)])
def test_a_batch_is_refused_exactly_when_what_stays_could_not_be_trained_in_time(per_step, steps_left):
    """Against every schedule: groups with given last steps can all be trained in time, P a step, or cannot."""
    last = range(1, steps_left + 1)
    size = per_step * steps_left

    def in_time(dues: tuple[int, ...]) -> bool:
        # Every assignment of the rest to later steps; an assignment is a count per step.
        places = [step for step in last for _ in range(per_step)]
        return any(
            all(step <= due for step, due in zip(chosen, dues))
            for chosen in set(itertools.permutations(places, len(dues)))
        )

    outcomes: Counter[bool] = Counter()
    for count in range(1, min(size, 5) + 1):
        for dues in itertools.combinations_with_replacement(last, count):
            admission = Admission(per_step, steps_left, None, 100)
            # P groups that are done and due first, beside those that stay.
            admission._due = {number: 0 for number in range(per_step)} | dict(enumerate(dues, start=per_step))
            possible = admission.batch(range(per_step)) is not None
            assert possible == in_time(dues), dues
            outcomes[possible] += 1
    assert outcomes[True] and outcomes[False]


def test_a_synchronous_group_given_up_before_is_waited_for() -> None:
    admission = Admission(2, 0, 2, steps=5)
    for number in range(4):
        admission.admit(number, urgent=number == 3)
    assert admission.batch([0, 1, 2]) is None, "the fast ones must not put it off again"
    assert admission.batch([0, 1, 3]) == [0, 3]
    admission.take([0, 3])
    for number in (1, 2):
        admission.withdraw(number)
    assert admission.room() == 0
    admission.version = 1
    assert admission.room() == 4
    admission.admit(4)
    admission.admit(5)
    assert admission.batch([4, 5]) == [4, 5]


def test_extra_groups_are_started_for_the_last_step_too() -> None:
    assert Admission(2, 0, 3, steps=1).room() == 5
    assert Admission(2, 1, 2, steps=1).room() == 2
