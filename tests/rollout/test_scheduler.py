"""The scheduler against doubles: what it returns depends on the draws alone, and it always comes to an end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rollcli.config.schema import TaskConfig, TaskSamplingConfig
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group
from rollcli.engines.base import SamplingParams
from rollcli.errors import EngineError, RolloutError, WorkerDied
from rollcli.rollout import groups as module
from rollcli.rollout.admission import Admission
from rollcli.rollout.groups import GroupRunner
from rollcli.rollout.router import Router
from rollcli.rollout.scheduler import Rules, Scheduler
from tests.rollout.doubles import Environments, Stream, SupervisorDouble, trajectory

LIMIT_S = 60
SAMPLING = SamplingParams(max_tokens=8)


def mixed(group: Group) -> bool:
    """As dynamic sampling judges."""
    accuracies = [member.accuracy for member in group.usable]
    return max(accuracies) > min(accuracies)


def everything(group: Group) -> bool:
    """Keeps all."""
    return True


def make(
    environments: Environments, per_step: int, *, replicas: int = 1, staleness: int = 0, extra: int | None = None,
    steps: int = 1000, stream: Stream | None = None, silence_s: float | None = None, **changes: Any,
) -> Scheduler:  # fmt: skip
    """Returns a scheduler; `seen` on it keeps the progress it reports."""
    seen: list[tuple] = []
    supervisor = SupervisorDouble(limit=0)
    progress = lambda *numbers: seen.append(numbers)  # noqa: E731
    runner = GroupRunner(environments, Router(replicas), supervisor, progress, silence_s)
    rules = {
        "group_size": 4, "max_group_attempts": 8, "max_failure_share": 0.5, "keep_group": mixed, "smallest_group": 2,
        **changes,
    }  # fmt: skip
    admission = Admission(per_step, staleness, extra, steps)
    scheduler = Scheduler(runner, stream or Stream(), admission, Rules(**rules))
    scheduler.seen = seen
    return scheduler


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def with_end(scheduler: Scheduler, work: Any) -> Any:
    """Returns what `work` gives, and ends what the scheduler has under way."""
    try:
        return await work
    finally:
        await scheduler.abandon()


async def steps_of(scheduler: Scheduler, count: int, start: int = 0) -> list[list[int]]:
    """Runs `count` steps, each under its version, and returns the draws of every batch."""
    batches = []
    for step in range(start, start + count):
        scheduler.serve(step)
        batches.append([group.task.index for group in await scheduler.collect(SAMPLING)])
    return batches


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def settled(scheduler: Scheduler) -> None:
    """Waits until every group that was admitted has ended."""
    await until(lambda: all(flight.work.done() for flight in scheduler._flights.values()))
    await asyncio.sleep(0)


def play(order: Any) -> Any:
    """Draws 0, 3, 6 … all right, 1, 4, 7 … all wrong, 2, 5, 8 … mixed."""
    kind = order.task.index % 3
    return trajectory(order, [1.0, 0.0, float(order.sample % 2)][kind])


def half(order: Any) -> Any:
    """Every group is mixed."""
    return trajectory(order, float(order.sample % 2))


def counts(**more: float) -> dict[str, float]:
    """A batch's counts when nothing goes wrong, and what does."""
    return {"groups_rejected": 0, "groups_aborted": 0, "episodes_restarted": 0, "failed": 0} | more


def fingerprint(groups: list[Group]) -> list[tuple]:
    return [(g.id, [(m.sample, m.tokens.tolist(), m.reward) for m in g.trajectories]) for g in groups]


def test_everything_kept_comes_in_the_order_drawn():
    scheduler = make(Environments(play, luck=1), 5, keep_group=everything)
    groups = run(scheduler.collect(SAMPLING))
    assert [group.id for group in groups] == [f"t/{n}" for n in range(5)]
    assert all([m.sample for m in group.trajectories] == [0, 1, 2, 3] for group in groups)
    assert scheduler.stream.drawn == 5 and scheduler.tally.metrics() == counts(groups_started=5)


def test_each_refused_group_admits_exactly_one_more():
    scheduler = make(Environments(play, luck=3), 4)
    groups = run(scheduler.collect(SAMPLING))
    assert [group.task.index for group in groups] == [2, 5, 8, 11]
    # 4 of every 3rd draw: 12 draws hold them, 8 of which are refused, and no draw beyond is needed.
    assert scheduler.stream.drawn == 12 and scheduler.tally.groups_refused == {"all right": 4, "all wrong": 4}
    assert scheduler.tally.metrics() == counts(
        **{"groups_started": 12, "groups_rejected": 8, "groups_rejected/all right": 4, "groups_rejected/all wrong": 4}
    )


def test_a_group_of_two_minds_that_the_algorithm_refuses_is_counted_as_such():
    scheduler = make(Environments(half), 1, keep_group=lambda group: group.task.index == 2)
    run(scheduler.collect(SAMPLING))
    assert scheduler.tally.groups_refused == {"refused by the algorithm": 2}


@pytest.mark.parametrize("workers", [1, 3])
def test_ten_orders_of_luck_give_one_batch(workers):
    async def both(scheduler: Scheduler) -> tuple:
        groups = await scheduler.collect(SAMPLING)
        scheduler.serve(1)
        groups += await scheduler.collect(SAMPLING)
        return fingerprint(groups), scheduler.stream.drawn, scheduler.stream.learned, scheduler.state()

    results = []
    for luck in range(10):
        results.append(run(both(make(Environments(play, workers, luck * 10), 4, replicas=1 + luck % 3))))
    assert all(result == results[0] for result in results)


def test_nothing_is_sampled_while_the_policy_is_trained():
    async def main() -> None:
        environments = Environments(half)
        scheduler = make(environments, 3)
        await scheduler.collect(SAMPLING)
        await asyncio.sleep(0.02)
        assert len(environments.orders) == 12 and scheduler.state() == {"stream": 3, "pending": [], "number": 3}
        scheduler.serve(1)
        await asyncio.sleep(0.02)
        assert len(environments.orders) == 12, "an evaluation may come first"
        await scheduler.collect(SAMPLING)
        assert len(environments.orders) == 24

    run(main())


def test_the_run_ends_without_a_group_too_many():
    async def main() -> None:
        for staleness, extra in ((0, None), (3, None), (2, 1)):
            scheduler = make(Environments(half, luck=1), 4, staleness=staleness, extra=extra, steps=5)
            batches = await steps_of(scheduler, 5)
            assert sorted(index for batch in batches for index in batch) == list(range(20))
            assert scheduler.stream.drawn == 20 and scheduler.state()["pending"] == []
            assert scheduler.stream.progress[-1] < 1

    run(main())


def test_the_cap_ends_it_with_the_shares():
    environments = Environments(lambda order: trajectory(order, float(order.task.index % 4 != 0)))
    scheduler = make(environments, 1, max_group_attempts=4)
    with pytest.raises(RolloutError) as caught:
        run(scheduler.collect(SAMPLING))
    assert caught.value.message == (
        "4 groups were sampled for a batch of 1 and too few are worth training on; "
        "of the 4 refused: 75% all right, 25% all wrong"
    )
    assert "max_group_attempts" in caught.value.hint and scheduler.stream.drawn == 4


@pytest.mark.parametrize("luck", range(5))
def test_the_cap_is_never_passed(luck):
    scheduler = make(Environments(lambda o: trajectory(o, 1.0), 2, luck), 3, max_group_attempts=4)
    with pytest.raises(RolloutError, match=r"12 groups were sampled for a batch of 3 .* 100% all right"):
        run(scheduler.collect(SAMPLING))
    assert scheduler.stream.drawn == 12


@pytest.mark.parametrize("staleness", [1, 3])
def test_the_cap_ends_it_while_sampling_runs_ahead(staleness):
    async def main() -> None:
        # Draws 0 … 7 are worth it; what follows is all right, half of it, or all wrong.
        environments = Environments(
            lambda o: half(o) if o.task.index < 8 else trajectory(o, float(o.task.index % 2)), luck=5
        )
        scheduler = make(environments, 4, staleness=staleness, max_group_attempts=3)
        assert sorted(index for batch in await steps_of(scheduler, 2) for index in batch) == list(range(8))
        scheduler.serve(2)
        with pytest.raises(RolloutError, match=r"of the 9 refused: \d+% all (right|wrong)"):
            await scheduler.collect(SAMPLING)
        assert environments.running == 0

    run(main())


def test_a_cap_of_one_refuses_nothing_silently():
    with pytest.raises(RolloutError, match="2 groups were sampled for a batch of 2"):
        run(make(Environments(play), 2, max_group_attempts=1).collect(SAMPLING))


def failing(*samples: int, of: Any = None, why: str = "too slow") -> Any:
    """Fails the given samples of every group."""

    def play(order: Any) -> Any:
        if order.sample in samples and (of is None or of(order.task.index)):
            return trajectory(order, 0.0, error=f"{why} {order.sample}", error_kind="timeout")
        return half(order)

    return play


def test_failed_episodes_are_counted_and_their_group_goes_on_without_them():
    scheduler = make(Environments(failing(0)), 3)
    groups = run(scheduler.collect(SAMPLING))
    assert [len(group.usable) for group in groups] == [3, 3, 3]
    assert scheduler.tally.metrics() == counts(**{"groups_started": 3, "failed": 3, "failed/timeout": 3})
    assert scheduler.tally.commonest() == "3 × timeout: too slow 0 (t/0, sample 0)"


def test_a_group_with_too_few_left_is_replaced():
    scheduler = make(Environments(failing(0, 1, 2, of=lambda index: index == 1)), 3)
    groups = run(scheduler.collect(SAMPLING))
    assert [group.task.index for group in groups] == [0, 2, 3]
    assert scheduler.tally.groups_refused == {"failed": 1}


def test_a_failure_that_spoils_its_group_takes_it_out_whole():
    def play(order: Any) -> Any:
        if (order.task.index, order.sample) == (1, 3):
            return trajectory(order, 0.0, error="scorer gone", error_kind="reward", spoils_group=True)
        return half(order)

    scheduler = make(Environments(play), 3)
    assert [group.task.index for group in run(scheduler.collect(SAMPLING))] == [0, 2, 3]
    assert scheduler.tally.groups_refused == {"failed": 1} and scheduler.tally.failures == {"reward": 1}
    # The three others were answers all the same.
    assert scheduler.stream.learned[:2] == [(0, 0.5), (1, pytest.approx(1 / 3))]


def test_too_many_failures_end_it_with_the_three_commonest_errors_and_a_sample_of_each():
    def play(order: Any) -> Any:
        why = ["a", "b", "c", "d"][min(order.sample, 3)] if order.task.index else "a"
        return trajectory(order, 0.0, error=f"because of {why}", error_kind="environment")

    scheduler = make(Environments(play), 3, max_failure_share=0.4)
    with pytest.raises(RolloutError) as caught:
        run(scheduler.collect(SAMPLING))
    message = caught.value.message
    assert message == (
        "12 of 12 episodes failed; the commonest: 6 × environment: because of a (t/0, sample 0); "
        "2 × environment: because of b (t/1, sample 1); 2 × environment: because of c (t/1, sample 2)"
    )
    assert "max_failure_share" in caught.value.hint


def test_too_many_failures_in_kept_groups_end_it():
    scheduler = make(Environments(failing(0, 1)), 3, max_failure_share=0.4)
    with pytest.raises(RolloutError, match=r"6 of 12 episodes failed; the commonest: 3 × timeout: too slow"):
        run(scheduler.collect(SAMPLING))


def test_exactly_the_allowed_share_is_allowed():
    assert len(run(make(Environments(failing(0, 1)), 3, max_failure_share=0.5).collect(SAMPLING))) == 3


def test_when_all_fail_it_ends_long_before_the_cap_and_says_so():
    scheduler = make(Environments(failing(0, 1, 2, 3), luck=2), 10, max_group_attempts=100)
    with pytest.raises(RolloutError, match=r"episodes failed.*timeout"):
        run(scheduler.collect(SAMPLING))
    assert scheduler.stream.drawn <= 25


def test_early_failures_alone_do_not_end_it():
    """The failing half is done first: only when nothing can save the batch is it given up."""
    environments = Environments(failing(0, 1, 2, 3, of=lambda index: index < 5))
    groups = run(make(environments, 5).collect(SAMPLING))
    assert [group.task.index for group in groups] == [5, 6, 7, 8, 9]


def test_an_error_that_ends_the_run_is_raised_and_nothing_runs_on():
    def play(order: Any) -> Any:
        if (order.task.index, order.sample) == (1, 2):
            return EngineError("the engine failed")
        return None

    environments = Environments(play)
    with pytest.raises(EngineError, match="the engine failed"):
        run(make(environments, 3).collect(SAMPLING))
    assert environments.aborts == 1 and not environments.running


def test_siblings_of_the_only_group_do_not_run_on_after_an_error():
    async def main() -> None:
        environments = Environments(lambda order: None if order.sample else EngineError("no"))
        scheduler = make(environments, 1)
        with pytest.raises(EngineError):
            await scheduler.collect(SAMPLING)
        await asyncio.sleep(0.01)
        assert environments.aborts == 1 and not environments.running
        assert all(caller.in_flight == 0 for caller in scheduler.runner._callers.values())
        assert left_over() == []

    run(main())


def left_over() -> list[asyncio.Task]:
    """Tasks of groups and episodes that still exist."""
    return [t for t in asyncio.all_tasks() if "._run" in repr(t.get_coro()) or "_episode" in repr(t.get_coro())]


def test_a_group_that_fails_in_the_background_is_raised_by_the_next_collect():
    async def main() -> None:
        environments = Environments(lambda o: EngineError("the engine failed") if o.task.index == 8 else half(o))
        scheduler = make(environments, 3, staleness=1)
        assert [group.task.index for group in await scheduler.collect(SAMPLING)] == [0, 1, 2]
        scheduler.serve(1)
        await settled(scheduler)
        assert scheduler.stream.drawn == 9
        with pytest.raises(EngineError, match="the engine failed"):
            await scheduler.collect(SAMPLING)
        assert environments.running == 0 and left_over() == []

    run(main())


@pytest.mark.parametrize("at", [3, 7])
def test_a_source_that_fails_when_a_refused_group_is_replaced_is_an_error_not_a_hang(at, caplog):
    class Torn(Stream):
        def draw(self, progress: float = 0.0) -> Any:
            if self.drawn == at:
                raise OSError("the disk is gone")
            return super().draw(progress)

    caplog.set_level(logging.CRITICAL)
    environments = Environments(lambda order: trajectory(order, 1.0))
    with pytest.raises(OSError, match="the disk is gone"):
        run(make(environments, 3, stream=Torn()).collect(SAMPLING))
    assert environments.running == 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_stopped_in_the_middle_it_leaves_nothing_and_a_restored_cursor_draws_the_same(staleness):
    async def main() -> None:
        environments = Environments(lambda order: None if order.task.index == 11 else play(order), 2, 7)
        scheduler = make(environments, 1, staleness=staleness)
        assert await steps_of(scheduler, 3) == [[2], [5], [8]]
        cursor = json.loads(json.dumps(scheduler.state()))
        scheduler.serve(3)
        work = asyncio.create_task(scheduler.collect(SAMPLING))
        await until(lambda: any(order.task.index == 11 for order in environments.orders))
        await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await scheduler.abandon()
        await asyncio.sleep(0.01)
        assert not environments.running and left_over() == []
        assert all(caller.in_flight == 0 for caller in scheduler.runner._callers.values())
        assert scheduler.runner.router.load == [0] and scheduler.runner.router.waiting == 0

        async def go_on(luck: int) -> list:
            again = make(Environments(play, luck=luck), 1, staleness=staleness)
            again.restore(cursor, 3)
            batches = await with_end(again, steps_of(again, 3, 3))
            return batches if staleness == 0 else sorted(index for batch in batches for index in batch)

        # With staleness the order is luck's, but what comes is what was pending, and what follows.
        expected = [[11], [14], [17]] if staleness == 0 else [11, 14, 17]
        assert await go_on(1) == await go_on(2) == expected

    run(main())


def test_a_worker_that_no_longer_answers_is_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr(module, "ABORT_LIMIT_S", 0.05)

    class Blocked(Environments):
        async def all(self, method: str) -> None:
            await asyncio.Event().wait()

    environments = Blocked(lambda order: None)
    with pytest.raises(WorkerDied, match=r"`environment-0` has not answered for 0.1 s: `t/0`") as caught:
        run(make(environments, 1, silence_s=0.1).collect(SAMPLING))
    assert "asyncio.to_thread" in caught.value.hint and caught.value.silent


def test_a_dead_worker_does_not_hide_the_error_that_ended_it():
    class Dead(Environments):
        async def all(self, method: str) -> None:
            raise WorkerDied("environment-0 died")

    with pytest.raises(EngineError, match="first"):
        run(make(Dead(lambda order: EngineError("first")), 1).collect(SAMPLING))


def test_progress_counts_every_episode():
    scheduler = make(Environments(failing(3), luck=4), 3)
    run(scheduler.collect(SAMPLING))
    assert [numbers[0] for numbers in scheduler.seen] == list(range(1, 13))
    assert {numbers[1] for numbers in scheduler.seen} == {12}
    done, total, states, longest = scheduler.seen[-1]
    assert (done, total, states, longest) == (12, 12, {"done": 9, "failed": 3}, 2)
    for done, total, states, _ in scheduler.seen:
        assert states.get("done", 0) + states.get("failed", 0) == done <= total


def test_progress_starts_anew_with_each_batch():
    async def main() -> None:
        scheduler = make(Environments(failing()), 2)
        for step in range(2):
            scheduler.seen.clear()
            await steps_of(scheduler, 1, step)
            assert [numbers[0] for numbers in scheduler.seen] == list(range(1, 9))
            assert {numbers[1] for numbers in scheduler.seen} == {8}

    run(main())


@pytest.mark.parametrize("luck", range(3))
def test_progress_never_shows_more_done_than_there_is_while_sampling_runs_ahead(luck):
    scheduler = make(Environments(failing(1, of=lambda index: index % 5 == 0), luck=luck), 3, staleness=2, steps=8)
    run(steps_of(scheduler, 8))
    for done, total, states, _ in scheduler.seen:
        assert states.get("done", 0) + states.get("failed", 0) == done <= total
    assert sum(numbers[0] == 1 for numbers in scheduler.seen) > 1


def test_an_episode_that_fails_in_the_background_is_counted_by_the_batch_it_ends_in():
    async def main() -> None:
        gate, counted = asyncio.Event(), Counter()

        environments = Environments(failing(0, of=lambda index: index >= 3))
        worker = environments.workers[0]
        straight = worker._run

        async def late(client: str, key: int, order: Any) -> None:
            if 3 <= order.task.index < 6:
                await gate.wait()
            await straight(client, key, order)

        worker._run = late
        scheduler = make(environments, 3, staleness=1)
        for step in range(4):
            scheduler.serve(step)
            await scheduler.collect(SAMPLING)
            # Draws 3 … 5 were started before the first batch was full, and end after it is.
            gate.set()
            await settled(scheduler)
            counted += scheduler.tally.failures
            assert scheduler.tally.failures.total() <= scheduler.tally.episodes
        settled_failures = counted + scheduler._counting.failures
        assert settled_failures == {"timeout": scheduler.stream.drawn - 3}

    run(main())


def test_groups_are_spread_and_kept_together():
    environments = Environments(play, workers=2)
    run(make(environments, 6, replicas=3, keep_group=everything).collect(SAMPLING))
    for worker, expected in zip(environments.workers, ({0, 2, 4}, {1, 3, 5})):
        assert {order.task.index for order in worker.orders} == expected
    by_task: dict[int, set[int]] = {}
    for order in environments.orders:
        by_task.setdefault(order.task.index, set()).add(order.replica)
    assert all(len(replicas) == 1 for replicas in by_task.values())
    assert sorted(next(iter(replicas)) for replicas in by_task.values()) == [0, 0, 1, 1, 2, 2]


def with_greedy(fails: Callable[[int], bool] = lambda index: False) -> Any:
    """Scores greedy answers 0.25, and fails those of the tasks it is true of."""

    def play(order: Any) -> Any:
        done = half(order)
        if order.sampling.temperature == 0:
            done.reward = 0.25
            if fails(order.task.index):
                done.error, done.error_kind = "too slow", "timeout"
        return done

    return play


def test_a_greedy_baseline_is_one_more_episode_of_each_group_and_kept_apart():
    environments = Environments(with_greedy(), luck=4)
    scheduler = make(environments, 3, greedy_baseline=True)
    groups = run(scheduler.collect(SAMPLING))
    assert [[m.sample for m in group.trajectories] for group in groups] == [[0, 1, 2, 3]] * 3
    assert [(group.greedy[0].sample, group.greedy_reward()) for group in groups] == [(4, 0.25)] * 3
    greedy = [order for order in environments.orders if order.sampling.temperature == 0]
    assert len(environments.orders) == 3 * 5 and sorted(order.task.index for order in greedy) == [0, 1, 2]
    assert all(order.sampling == SAMPLING for order in environments.orders if order not in greedy)
    assert all(order.sampling.max_tokens == SAMPLING.max_tokens for order in greedy)
    assert scheduler.tally.metrics() == counts(groups_started=3)
    assert scheduler.seen[-1][:2] == (15, 15) and scheduler.runner.router.load == [0]


def test_a_greedy_baseline_of_one_answer_is_told_from_it():
    scheduler = make(
        Environments(with_greedy()), 1, group_size=1, smallest_group=1, keep_group=everything, greedy_baseline=True
    )
    (group,) = run(scheduler.collect(SAMPLING))
    assert [m.sample for m in group.trajectories] == [0] and group.greedy[0].sample == 1


def test_a_greedy_answer_that_fails_refuses_its_group():
    scheduler = make(Environments(with_greedy(lambda index: index == 1)), 3, greedy_baseline=True)
    assert [group.task.index for group in run(scheduler.collect(SAMPLING))] == [0, 2, 3]
    assert scheduler.tally.groups_refused == {"failed": 1}
    assert scheduler.tally.metrics() == counts(
        **{"groups_started": 4, "groups_rejected": 1, "groups_rejected/failed": 1, "failed": 1, "failed/timeout": 1}
    )


def test_greedy_answers_that_always_fail_end_it():
    scheduler = make(Environments(with_greedy(lambda index: True)), 3, greedy_baseline=True, max_group_attempts=3)
    with pytest.raises(RolloutError, match=r"9 groups were sampled for a batch of 3 .* 100% failed") as caught:
        run(scheduler.collect(SAMPLING))
    assert "9 × timeout: too slow" in caught.value.hint


def test_what_was_learned_is_told_in_the_order_of_draws_and_a_group_without_an_answer_teaches_nothing():
    def play(order: Any) -> Any:
        if order.task.index == 2:
            return trajectory(order, 0.0, error="no", error_kind="timeout")
        return trajectory(order, float(order.sample < order.task.index))

    scheduler = make(Environments(play, luck=3), 3, keep_group=everything)
    run(scheduler.collect(SAMPLING))
    assert scheduler.stream.learned == [(0, 0.0), (1, 0.25), (3, 0.75)]


def of_draws(*slow: int) -> Callable[[Any], Any]:
    """Episodes of the given draws never end, the first time they are asked for."""
    asked: Counter[tuple[int, int]] = Counter()

    def play(order: Any) -> Any:
        asked[order.task.index, order.sample] += 1
        once = order.task.index in slow and asked[order.task.index, order.sample] == 1
        return None if once else half(order)

    return play


def test_synchronous_extra_groups_are_aborted_and_their_problems_come_again():
    async def main() -> None:
        environments = Environments(of_draws(1, 4), luck=2)
        scheduler = make(environments, 5, extra=2)
        groups = await scheduler.collect(SAMPLING)
        assert [group.task.index for group in groups] == [0, 2, 3, 5, 6]
        assert scheduler.tally.metrics() == counts(groups_started=7, groups_aborted=2)
        await asyncio.sleep(0.01)
        assert not environments.running and left_over() == [] and scheduler.runner.router.load == [0]
        assert scheduler.state() == {"stream": 7, "pending": [["t", 1, 1], ["t", 4, 4]], "number": 7}
        scheduler.serve(1)
        second = await scheduler.collect(SAMPLING)
        assert {1, 4} <= set(environments.orders[n].task.index for n in range(28, len(environments.orders)))
        later = [group.task.index for group in second]
        pending = [index for _, index, _ in scheduler.state()["pending"]]
        assert sorted(later + pending) == [1, 4, *range(7, 12)] and pending == sorted(pending)

    run(main())


@pytest.mark.parametrize("luck", range(6))
def test_synchronous_extra_groups_lose_and_repeat_nothing(luck):
    chance = random.Random(luck)
    fate = {index: chance.random() for index in range(200)}

    def play(order: Any) -> Any:
        return trajectory(order, 1.0) if fate[order.task.index] < 0.3 else half(order)

    async def main() -> None:
        scheduler = make(Environments(play, 2, luck), 3, extra=luck, steps=12)
        trained: list[int] = []
        for step in range(12):
            batch = (await steps_of(scheduler, 1, step))[0]
            assert batch == sorted(batch) or luck  # those that came again may stand before newer draws
            trained += batch
        assert len(trained) == len(set(trained)) == 36 and all(fate[index] >= 0.3 for index in trained)
        pending = {index for _, index, _ in scheduler.state()["pending"]}
        refused = {index for index in range(scheduler.stream.drawn) if fate[index] < 0.3}
        assert set(trained) | pending | refused == set(range(scheduler.stream.drawn))
        assert not pending & set(trained)
        # What was given up teaches nothing: its problem comes again.
        learned = [index for index, _ in scheduler.stream.learned]
        assert len(learned) == len(set(learned)) and set(trained) <= set(learned) <= set(trained) | refused

    run(main())


def test_asynchronous_extra_groups_stay_for_the_next_step():
    async def main() -> None:
        environments = Environments(half)
        scheduler = make(environments, 5, staleness=1, extra=2)
        assert [group.task.index for group in await scheduler.collect(SAMPLING)] == [0, 1, 2, 3, 4]
        # 7 were started; the 2 left stay, and with version 0 up to 5 may wait for step 1.
        await settled(scheduler)
        assert scheduler.stream.drawn == 10 and scheduler.metrics()["groups_buffered"] == 5
        assert scheduler.tally.groups_aborted == 0
        scheduler.serve(1)
        assert [group.task.index for group in await scheduler.collect(SAMPLING)] == [5, 6, 7, 8, 9]
        assert Counter(order.task.index for order in environments.orders).most_common(1)[0][1] == 4

    run(main())


@pytest.mark.parametrize(("staleness", "extra", "luck"), [(1, None, 0), (2, 3, 1), (3, None, 2), (4, 0, 3)])
def test_in_the_middle_of_an_asynchronous_run_the_cursor_holds_every_untrained_draw_once(staleness, extra, luck):
    chance = random.Random(luck)
    fate = {index: chance.random() for index in range(1000)}

    def play(order: Any) -> Any:
        return trajectory(order, 1.0) if fate[order.task.index] < 0.25 else half(order)

    async def main() -> None:
        scheduler = make(Environments(play, 2, luck), 4, staleness=staleness, extra=extra, steps=40)
        trained: list[int] = []
        refused = 0
        for step in range(40):
            if step in (11, 25):
                cursor = json.loads(json.dumps(scheduler.state()))
                await scheduler.abandon()
                scheduler = make(Environments(play, 2, luck + step), 4, staleness=staleness, extra=extra, steps=40)
                scheduler.restore(cursor, step)
            (batch,) = await steps_of(scheduler, 1, step)
            trained += batch
            refused += scheduler.tally.groups_refused.total()
            for _ in range(chance.randrange(40)):  # training takes a while
                await asyncio.sleep(0)
            state = scheduler.state()
            pending = [index for _, index, _ in state["pending"]]
            assert sorted(trained + pending) == sorted(set(trained + pending))
            # Every draw is trained, waits, or was counted as refused in the step whose batch it did not get into.
            assert len(trained) + len(pending) + refused == state["stream"]
        assert len(trained) == 160 and all(fate[index] >= 0.25 for index in trained)

    run(main())


def test_two_hundred_steps_never_pass_the_bound_and_memory_stays_flat():
    """Versions as the replicas have them when a sample begins, resumed in the middle; no model."""
    bound, per_step = 2, 4
    chance = random.Random(5)
    serving = {"version": 0}
    histogram: Counter[int] = Counter()

    def play(order: Any) -> Any:
        done = half(order)
        done.versions[1:] = order.version
        return done

    class Timed(Environments):
        """Notes the version when an episode starts, and takes long for some: as published, heavy-tailed."""

        def __init__(self) -> None:
            super().__init__(play)
            worker = self.workers[0]
            straight = worker._run

            async def late(client: str, key: int, order: Any) -> None:
                object.__setattr__(order, "version", serving["version"])  # as the replica would stamp the first token
                for _ in range(min(int(chance.paretovariate(1.1)), 400)):
                    await asyncio.sleep(0)
                await straight(client, key, order)

            worker._run = late

    def fresh() -> Scheduler:
        return make(Timed(), per_step, staleness=bound, steps=200)

    async def main() -> list[int]:
        scheduler, trained, sizes = fresh(), [], []
        for step in range(200):
            if step == 101:
                cursor = scheduler.state()
                await scheduler.abandon()
                scheduler = fresh()
                scheduler.restore(cursor, step)
            serving["version"] = step
            scheduler.serve(step)
            groups = await scheduler.collect(SAMPLING)
            trained += [group.task.index for group in groups]
            histogram.update(step - int(m.versions[m.loss_mask].min()) for g in groups for m in g.trajectories)
            for _ in range(chance.randrange(300)):
                await asyncio.sleep(0)
            # What tests keep to look at, not the scheduler.
            scheduler.runner.environments.workers[0].orders.clear()
            scheduler.seen.clear()
            scheduler.stream.learned.clear()
            scheduler.stream.progress.clear()
            if step in (50, 100, 150, 195):
                await settled(scheduler)
                gc.collect()
                held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/rollcli/*")])
                sizes.append(sum(trace.size for trace in held.traces))
        assert sorted(trained) == list(range(200 * per_step))
        return sizes

    tracemalloc.start()
    try:
        sizes = run(main())
    finally:
        tracemalloc.stop()
    assert set(histogram) == {0, 1, 2} and histogram.total() == 200 * per_step * 4
    assert max(sizes) - min(sizes) < 20_000, sizes


@pytest.mark.parametrize("seed", range(10))
def test_abandoned_at_any_moment_nothing_starts_after_it(seed):
    async def main() -> None:
        environments = Environments(play, 2, seed)
        scheduler = make(environments, 3, staleness=seed % 3)
        work = asyncio.create_task(steps_of(scheduler, 50) if seed % 3 else scheduler.collect(SAMPLING))
        for _ in range(random.Random(seed).randrange(20, 120)):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await scheduler.abandon()
        sent = len(environments.orders)
        await asyncio.sleep(0.02)
        assert len(environments.orders) == sent and environments.running == 0 and left_over() == []
        assert scheduler.runner.router.load == [0] and scheduler.runner.router.waiting == 0

    run(main())


def test_a_group_that_ends_while_all_is_abandoned_starts_no_other():
    async def main() -> None:
        environments = Environments(lambda order: trajectory(order, 1.0), luck=0)
        scheduler = make(environments, 20, max_group_attempts=1000)
        work = asyncio.create_task(scheduler.collect(SAMPLING))
        # A group has ended in this very turn of the loop, and the scheduler has yet to hear of it.
        while not any(flight.work.done() for flight in scheduler._flights.values()):
            await asyncio.sleep(0)
        started = scheduler._counting.groups_started
        await scheduler.abandon()
        assert scheduler._counting.groups_started == started and scheduler._flights == {}
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert environments.running == 0 and left_over() == []

    run(main())


def test_whether_it_gives_up_does_not_depend_on_the_order_groups_end_in():
    """Draw 0 fails, draw 1 is all right and refused, the others are kept: 4 of 16 episodes, whoever is first."""

    def play(order: Any) -> Any:
        if order.task.index == 0:
            return trajectory(order, 0.0, error="slow", error_kind="timeout")
        return trajectory(order, 1.0) if order.task.index == 1 else half(order)

    for luck in range(12):
        groups = run(make(Environments(play, 1, luck * 7), 2, max_failure_share=0.3).collect(SAMPLING))
        assert [group.task.index for group in groups] == [2, 3]


def test_an_asynchronous_batch_is_judged_by_its_own_groups():
    """One group in twenty fails at once, and ends before its batch: no window of quick endings stops the run."""

    def play(order: Any) -> Any:
        if order.task.index % 20 == 0:
            return trajectory(order, 0.0, error="long", error_kind="prompt_too_long")
        return half(order)

    async def main() -> list[list[int]]:
        scheduler = make(Environments(play, 1, 3), 20, staleness=2, steps=6)
        return await with_end(scheduler, steps_of(scheduler, 6))

    drawn = [index for batch in run(main()) for index in batch]
    assert len(drawn) == len(set(drawn)) == 120 and not any(index % 20 == 0 for index in drawn)


def test_the_cap_on_attempts_leaves_room_for_all_the_groups_that_are_under_way():
    """One group in five is kept: seven refused for each would be too many, four are not."""

    def play(order: Any) -> Any:
        return half(order) if order.task.index % 5 == 0 else trajectory(order, 1.0)

    async def main(staleness: int) -> list[list[int]]:
        scheduler = make(Environments(play, 1, 3), 8, staleness=staleness, steps=4)
        return await with_end(scheduler, steps_of(scheduler, 4))

    for staleness in (0, 2, 4):
        assert [len(batch) for batch in run(main(staleness))] == [8, 8, 8, 8]


def test_a_task_of_its_own_group_size_and_budget_has_them():
    own = TaskConfig("t", None, group_size=2, sampling=TaskSamplingConfig(max_tokens=5, stop=["!"]))
    environments = Environments(half)
    groups = run(make(environments, 3, tasks=[own, TaskConfig("u", None)]).collect(SAMPLING))
    assert [len(group.trajectories) for group in groups] == [2, 2, 2]
    assert {order.sampling for order in environments.orders} == {SamplingParams(max_tokens=5, stop=("!",))}
    environments = Environments(half)
    groups = run(make(environments, 3, tasks=[TaskConfig("t", None)]).collect(SAMPLING))
    assert [len(group.trajectories) for group in groups] == [4, 4, 4]
    assert {order.sampling for order in environments.orders} == {SAMPLING}


def players(wins: Callable[[int, str], float]) -> Any:
    """Each episode has two trajectories, one for each player."""

    def play(order: Any) -> Any:
        both = [trajectory(order, wins(order.sample, agent), agent=agent) for agent in ("first", "second")]
        return both

    return play


def test_players_are_compared_with_their_likes_and_a_group_is_kept_for_either():
    # The first player always wins: only together do they differ, which teaches nobody anything.
    scheduler = make(Environments(players(lambda sample, agent: float(agent == "first"))), 1)
    with pytest.raises(RolloutError, match="refused by the algorithm"):
        run(scheduler.collect(SAMPLING))
    scheduler = make(Environments(players(lambda sample, agent: float(agent == "first" and sample == 0))), 1)
    (group,) = run(scheduler.collect(SAMPLING))
    assert [(m.sample, m.agent) for m in group.trajectories][:3] == [(0, "first"), (0, "second"), (1, "first")]
    assert scheduler.tally.episodes == 4 and len(group.trajectories) == 8
    assert [len(each.trajectories) for each in group.by_agent()] == [4, 4]
    batch = Batch.from_groups([group])
    assert batch.samples["group"].tolist() == [0, 1] * 4
    assert batch.group_means("reward").tolist() == [0.25, 0.0] * 4


def test_an_episode_of_several_trajectories_fails_once():
    def play(order: Any) -> Any:
        failed = order.sample < 3
        return [half(order), trajectory(order, 0.0, error="no" if failed else None, error_kind="timeout")]

    scheduler = make(Environments(play), 1, keep_group=everything, max_failure_share=0.75)
    (group,) = run(scheduler.collect(SAMPLING))
    assert group.failed_episodes == 3 and scheduler.tally.failures == {"timeout": 3}
    with pytest.raises(RolloutError, match="3 of 4 episodes failed"):
        run(make(Environments(play), 1, keep_group=everything, max_failure_share=0.74).collect(SAMPLING))
