"""The scheduler against doubles: what it returns depends on the draws alone, and it always comes to an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollcli.data.carriers import Group
from rollcli.engines.base import SamplingParams
from rollcli.errors import EngineError, RolloutError, WorkerDied
from rollcli.rollout import scheduler as module
from rollcli.rollout.router import Router
from rollcli.rollout.scheduler import Scheduler
from tests.rollout.doubles import Environments, Stream, task, trajectory

LIMIT_S = 60
SAMPLING = SamplingParams(max_tokens=8)


def mixed(group: Group) -> bool:
    """As dynamic sampling judges."""
    accuracies = [member.accuracy for member in group.usable]
    return max(accuracies) > min(accuracies)


def make(environments: Environments, replicas: int = 1, **changes: Any) -> Scheduler:
    seen: list[tuple] = []
    options = {
        "group_size": 4, "max_group_attempts": 8, "max_failure_share": 0.5, "keep_group": mixed, "smallest_group": 2,
        "progress": lambda *numbers: seen.append(numbers), **changes,
    }  # fmt: skip
    scheduler = Scheduler(environments, Router(replicas), **options)
    scheduler.seen = seen
    return scheduler


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def play(order: Any) -> Any:
    """Draws 0, 3, 6 … all right, 1, 4, 7 … all wrong, 2, 5, 8 … mixed."""
    kind = order.task.index % 3
    return trajectory(order, [1.0, 0.0, float(order.sample % 2)][kind])


def fingerprint(groups: list[Group]) -> list[tuple]:
    return [(g.id, [(m.sample, m.tokens.tolist(), m.reward) for m in g.trajectories]) for g in groups]


def test_everything_kept_comes_in_the_order_drawn():
    environments = Environments(play, luck=1)
    scheduler, stream = make(environments, keep_group=lambda group: True), Stream()
    groups = run(scheduler.collect(stream, 5, SAMPLING))
    assert [group.id for group in groups] == [f"t/{n}" for n in range(5)]
    assert all([m.sample for m in group.trajectories] == [0, 1, 2, 3] for group in groups)
    assert stream.drawn == 5 and scheduler.tally.metrics() == {
        "groups_started": 5, "groups_rejected": 0, "failed": 0,
    }  # fmt: skip


def test_each_refused_group_admits_exactly_one_more():
    stream = Stream()
    scheduler = make(Environments(play, luck=3))
    groups = run(scheduler.collect(stream, 4, SAMPLING))
    assert [group.task.index for group in groups] == [2, 5, 8, 11]
    # 4 of every 3rd draw: 12 draws hold them, 8 of which are refused, and no draw beyond is needed.
    assert stream.drawn == 12 and scheduler.tally.groups_refused == {"all right": 4, "all wrong": 4}
    assert scheduler.tally.metrics()["groups_rejected"] == 8


@pytest.mark.parametrize("workers", [1, 3])
def test_ten_orders_of_luck_give_one_batch(workers):
    batches = []
    for luck in range(10):
        stream = Stream()
        scheduler = make(Environments(play, workers, luck * 10), replicas=1 + luck % 3)
        batches.append((fingerprint(run(scheduler.collect(stream, 4, SAMPLING))), stream.drawn))
    assert all(batch == batches[0] for batch in batches)


def test_the_cap_ends_it_with_the_shares():
    stream = Stream()
    scheduler = make(
        Environments(lambda order: trajectory(order, float(order.task.index % 4 != 0))), max_group_attempts=4
    )
    with pytest.raises(RolloutError) as caught:
        run(scheduler.collect(stream, 1, SAMPLING))
    assert caught.value.message == (
        "4 groups were sampled for a batch of 1 and too few are worth training on; "
        "of those refused: 75% all right, 25% all wrong"
    )
    assert "max_group_attempts" in caught.value.hint and stream.drawn == 4


@pytest.mark.parametrize("luck", range(5))
def test_the_cap_is_never_passed(luck):
    stream = Stream()
    with pytest.raises(RolloutError, match=r"12 groups were sampled for a batch of 3 .* 100% all right"):
        run(
            make(Environments(lambda o: trajectory(o, 1.0), 2, luck), max_group_attempts=4).collect(stream, 3, SAMPLING)
        )
    assert stream.drawn == 12


def test_a_cap_of_one_refuses_nothing_silently():
    with pytest.raises(RolloutError, match="2 groups were sampled for a batch of 2"):
        run(make(Environments(play), max_group_attempts=1).collect(Stream(), 2, SAMPLING))


def failing(*samples: int, of: Any = None) -> Any:
    """Fails the given samples of every group."""

    def play(order: Any) -> Any:
        if order.sample in samples and (of is None or of(order.task.index)):
            return trajectory(order, 0.0, error=f"too slow {order.sample}", error_kind="timeout")
        return trajectory(order, float(order.sample % 2))

    return play


def test_failed_episodes_are_counted_and_their_group_goes_on_without_them():
    scheduler = make(Environments(failing(0)))
    groups = run(scheduler.collect(Stream(), 3, SAMPLING))
    assert [len(group.usable) for group in groups] == [3, 3, 3]
    assert scheduler.tally.metrics() == {"groups_started": 3, "groups_rejected": 0, "failed": 3, "failed/timeout": 3}
    assert scheduler.tally.example == "t/0: too slow 0"


def test_a_group_with_too_few_left_is_replaced():
    scheduler = make(Environments(failing(0, 1, 2, of=lambda index: index == 1)))
    groups = run(scheduler.collect(Stream(), 3, SAMPLING))
    assert [group.task.index for group in groups] == [0, 2, 3]
    assert scheduler.tally.groups_refused == {"failed": 1}


def test_too_many_failures_end_it_with_the_numbers():
    scheduler = make(Environments(failing(0, 1)), max_failure_share=0.4)
    with pytest.raises(RolloutError, match=r"6 of 12 episodes failed \(6 timeout\); first: t/0: too slow"):
        run(scheduler.collect(Stream(), 3, SAMPLING))


def test_exactly_the_allowed_share_is_allowed():
    assert len(run(make(Environments(failing(0, 1)), max_failure_share=0.5).collect(Stream(), 3, SAMPLING))) == 3


def test_when_all_fail_it_ends_long_before_the_cap_and_says_so():
    stream = Stream()
    scheduler = make(Environments(failing(0, 1, 2, 3), luck=2), max_group_attempts=100)
    with pytest.raises(RolloutError, match=r"episodes failed.*timeout"):
        run(scheduler.collect(stream, 10, SAMPLING))
    assert stream.drawn <= 25


def test_early_failures_alone_do_not_end_it():
    """The failing half is done first: only when nothing can save the batch is it given up."""
    environments = Environments(failing(0, 1, 2, 3, of=lambda index: index < 5))
    groups = run(make(environments).collect(Stream(), 5, SAMPLING))
    assert [group.task.index for group in groups] == [5, 6, 7, 8, 9]


def test_an_error_that_ends_the_run_is_raised_and_nothing_runs_on():
    def play(order: Any) -> Any:
        if (order.task.index, order.sample) == (1, 2):
            return EngineError("the engine failed")
        return None

    environments = Environments(play)
    scheduler = make(environments)
    with pytest.raises(EngineError, match="the engine failed"):
        run(scheduler.collect(Stream(), 3, SAMPLING))
    assert environments.aborts == 1 and not environments.workers[0].running


def test_siblings_of_the_only_group_do_not_run_on_after_an_error():
    async def main() -> None:
        environments = Environments(lambda order: None if order.sample else EngineError("no"))
        scheduler = make(environments)
        with pytest.raises(EngineError):
            await scheduler.collect(Stream(), 1, SAMPLING)
        await asyncio.sleep(0.01)
        assert environments.aborts == 1 and not environments.workers[0].running
        assert all(caller.in_flight == 0 for caller in scheduler._callers)

    run(main())


def test_cancelled_in_the_middle_leaves_nothing_and_a_restored_cursor_draws_the_same():
    async def main() -> None:
        stuck = True
        environments = Environments(lambda order: None if stuck and order.task.index == 5 else play(order), 2, 7)
        scheduler, stream = make(environments), Stream()
        await scheduler.collect(stream, 1, SAMPLING)
        cursor = stream.state()
        work = asyncio.create_task(scheduler.collect(stream, 2, SAMPLING))
        while not any(order.task.index == 5 for order in environments.orders):
            await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await asyncio.sleep(0.01)
        assert not any(worker.running for worker in environments.workers)
        assert all(caller.in_flight == 0 for caller in scheduler._callers)
        assert [t for t in asyncio.all_tasks() if "_follow" in repr(t) or "_episode" in repr(t)] == []
        assert scheduler.router.load == [0]
        stuck = False
        stream.restore(cursor)
        groups = await scheduler.collect(stream, 2, SAMPLING)
        assert [group.task.index for group in groups] == [5, 8]
        undisturbed = Stream()
        undisturbed.restore(cursor)
        again = await make(Environments(play)).collect(undisturbed, 2, SAMPLING)
        assert fingerprint(again) == fingerprint(groups) and undisturbed.drawn == stream.drawn

    run(main())


def test_a_worker_that_no_longer_answers_is_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr(module, "ABORT_LIMIT_S", 0.05)

    class Blocked(Environments):
        async def all(self, method: str) -> None:
            await asyncio.Event().wait()

    environments = Blocked(lambda order: None)
    with pytest.raises(WorkerDied, match=r"`environment-0` has not answered for 0.1 s: `t/0`") as caught:
        run(make(environments, silence_s=0.1).collect(Stream(), 1, SAMPLING))
    assert "asyncio.to_thread" in caught.value.hint


def test_a_dead_worker_does_not_hide_the_error_that_ended_it():
    class Dead(Environments):
        async def all(self, method: str) -> None:
            raise WorkerDied("environment-0 died")

    with pytest.raises(EngineError, match="first"):
        run(make(Dead(lambda order: EngineError("first"))).collect(Stream(), 1, SAMPLING))


def test_progress_counts_every_episode():
    scheduler = make(Environments(failing(3), luck=4))
    run(scheduler.collect(Stream(), 3, SAMPLING))
    assert [numbers[0] for numbers in scheduler.seen] == list(range(1, 13))
    assert {numbers[1] for numbers in scheduler.seen} == {12}
    done, total, states, longest = scheduler.seen[-1]
    assert (done, total, states, longest) == (12, 12, {"done": 9, "failed": 3}, 2)
    for done, total, states, _ in scheduler.seen:
        assert states.get("done", 0) + states.get("failed", 0) == done <= total


def test_progress_starts_anew_with_each_batch():
    async def main() -> None:
        scheduler, stream = make(Environments(failing())), Stream()
        for _ in range(2):
            scheduler.seen.clear()
            await scheduler.collect(stream, 2, SAMPLING)
            assert [numbers[0] for numbers in scheduler.seen] == list(range(1, 9))

    run(main())


def test_evaluation_keeps_everything_in_order():
    scheduler = make(Environments(failing(0, 1, of=lambda index: index == 1), 2, 9))
    groups = run(scheduler.run_tasks([task(n) for n in (7, 1, 3)], 2, SAMPLING))
    assert [group.task.index for group in groups] == [7, 1, 3]
    assert [len(group.trajectories) for group in groups] == [2, 2, 2] and len(groups[1].usable) == 0
    assert run(make(Environments(play)).run_tasks([], 2, SAMPLING)) == []


def test_evaluation_with_too_many_failures_ends():
    with pytest.raises(RolloutError, match="4 of 4 episodes failed"):
        run(make(Environments(failing(0, 1))).run_tasks([task(0), task(1)], 2, SAMPLING))


def test_groups_are_spread_and_kept_together():
    environments = Environments(play, workers=2)
    scheduler = make(environments, replicas=3, keep_group=lambda group: True)
    run(scheduler.collect(Stream(), 6, SAMPLING))
    for worker, expected in zip(environments.workers, ({0, 2, 4}, {1, 3, 5})):
        assert {order.task.index for order in worker.orders} == expected
    by_task: dict[int, set[int]] = {}
    for order in environments.orders:
        by_task.setdefault(order.task.index, set()).add(order.replica)
    assert all(len(replicas) == 1 for replicas in by_task.values())
    assert sorted(next(iter(replicas)) for replicas in by_task.values()) == [0, 0, 1, 1, 2, 2]


def with_greedy(**changes: Any) -> Any:
    """Scores greedy answers 0.25, and with `error` fails those of the tasks it is true of."""
    fails = changes.get("error", lambda index: False)

    def play(order: Any) -> Any:
        done = trajectory(order, float(order.sample % 2))
        if order.sampling.temperature == 0:
            done.reward = 0.25
            if fails(order.task.index):
                done.error, done.error_kind = "too slow", "timeout"
        return done

    return play


def test_a_greedy_baseline_is_one_more_episode_of_each_group_and_kept_apart():
    environments = Environments(with_greedy(), luck=4)
    scheduler = make(environments, greedy_baseline=True)
    groups = run(scheduler.collect(Stream(), 3, SAMPLING))
    assert [[m.sample for m in group.trajectories] for group in groups] == [[0, 1, 2, 3]] * 3
    assert [(group.greedy.sample, group.greedy_reward) for group in groups] == [(4, 0.25)] * 3
    greedy = [order for order in environments.orders if order.sampling.temperature == 0]
    assert len(environments.orders) == 3 * 5 and sorted(order.task.index for order in greedy) == [0, 1, 2]
    assert all(order.sampling == SAMPLING for order in environments.orders if order not in greedy)
    assert all(order.sampling.max_tokens == SAMPLING.max_tokens for order in greedy)
    assert scheduler.tally.metrics() == {"groups_started": 3, "groups_rejected": 0, "failed": 0}
    assert scheduler.seen[-1][:2] == (15, 15) and scheduler.router.load == [0]


def test_a_greedy_baseline_of_one_answer_is_told_from_it():
    scheduler = make(
        Environments(with_greedy()), group_size=1, smallest_group=1, keep_group=lambda group: True, greedy_baseline=True
    )
    (group,) = run(scheduler.collect(Stream(), 1, SAMPLING))
    assert [m.sample for m in group.trajectories] == [0] and group.greedy.sample == 1


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_evaluation_has_no_greedy_baseline(temperature):
    environments = Environments(with_greedy())
    sampling = SamplingParams(max_tokens=8, temperature=temperature)
    groups = run(make(environments, greedy_baseline=True).run_tasks([task(0), task(1)], 3, sampling))
    assert len(environments.orders) == 6 and all(group.greedy is None for group in groups)
    assert [len(group.trajectories) for group in groups] == [3, 3]


def test_a_greedy_answer_that_fails_refuses_its_group():
    scheduler = make(Environments(with_greedy(error=lambda index: index == 1)), greedy_baseline=True)
    groups = run(scheduler.collect(Stream(), 3, SAMPLING))
    assert [group.task.index for group in groups] == [0, 2, 3]
    assert scheduler.tally.groups_refused == {"failed": 1}
    assert scheduler.tally.metrics() == {"groups_started": 4, "groups_rejected": 1, "failed": 1, "failed/timeout": 1}


def test_greedy_answers_that_always_fail_end_it():
    scheduler = make(Environments(with_greedy(error=lambda index: True)), greedy_baseline=True, max_group_attempts=3)
    with pytest.raises(RolloutError, match=r"9 groups were sampled for a batch of 3 .* 100% failed"):
        run(scheduler.collect(Stream(), 3, SAMPLING))
