"""Groups against doubles: whatever becomes of workers meanwhile, each sample comes once, in its place."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from rollcli.engines.base import SamplingParams
from rollcli.errors import EngineError, WorkerDied
from rollcli.rollout import groups as module
from rollcli.rollout.groups import EPISODE_ATTEMPTS, GroupRunner
from rollcli.rollout.router import Router
from rollcli.rollout.tally import Tally
from tests.rollout.doubles import EnvironmentDouble, Environments, SupervisorDouble, task, trajectory

LIMIT_S = 60
SAMPLING = SamplingParams(max_tokens=8)


def half(order: Any) -> Any:
    return trajectory(order, float(order.sample % 2))


def make(environments: Environments, supervisor: SupervisorDouble | None = None, **options: Any) -> GroupRunner:
    """Returns a runner; `seen` on it keeps the progress it reports."""
    seen: list[tuple] = []
    router = options.pop("router", None) or Router(1)
    runner = GroupRunner(
        environments, router, supervisor or SupervisorDouble(0), lambda *numbers: seen.append(numbers), **options
    )
    runner.seen = seen
    return runner


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def dying(name: str, times: int, of: Any = lambda order: True) -> Any:
    """Episodes during which the worker called `name` ends, the first `times` times each."""
    asked: Counter[tuple[int, int]] = Counter()

    def play(order: Any) -> Any:
        key = (order.task.index, order.sample)
        asked[key] += of(order)
        return WorkerDied(f"worker `{name}` died", worker=name) if of(order) and asked[key] <= times else half(order)

    return play


def test_evaluation_keeps_everything_in_order():
    def play(order: Any) -> Any:
        return trajectory(order, 0.0, error="no", error_kind="timeout") if order.task.index == 1 else half(order)

    groups = run(
        make(Environments(play, 2, 9)).run_all([(each, [SAMPLING] * 2) for each in [task(n) for n in (7, 1, 3)]])
    )
    assert [group.task.index for group in groups] == [7, 1, 3]
    assert [len(group.trajectories) for group in groups] == [2, 2, 2] and len(groups[1].usable) == 0
    assert run(make(Environments(half)).run_all([])) == []


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_evaluation_has_no_greedy_baseline(temperature):
    environments = Environments(half)
    sampling = SamplingParams(max_tokens=8, temperature=temperature)
    groups = run(make(environments).run_all([(each, [sampling] * 3) for each in [task(0), task(1)]]))
    assert len(environments.orders) == 6 and all(not group.greedy for group in groups)
    assert [len(group.trajectories) for group in groups] == [3, 3]


def test_an_error_in_an_evaluation_ends_all_of_it():
    async def main() -> None:
        environments = Environments(lambda o: EngineError("no") if (o.task.index, o.sample) == (1, 1) else None)
        runner = make(environments)
        with pytest.raises(EngineError):
            await runner.run_all([(each, [SAMPLING] * 2) for each in [task(n) for n in range(3)]])
        await asyncio.sleep(0.01)
        assert runner.router.load == [0]
        # The failed group's other sample has no one who waits for it; the others' are aborted.
        await runner.end_all()
        await asyncio.sleep(0.01)
        assert environments.running == 0 and all(caller.in_flight == 0 for caller in runner._callers.values())

    run(main())


@pytest.mark.parametrize("name", ["rollout-0", "environment-0", "reward-1"])
def test_an_episode_runs_again_with_the_same_seeds_when_a_worker_it_uses_ends(name):
    supervisor, tally = SupervisorDouble(), Tally()
    environments = Environments(dying(name, 1, of=lambda order: order.sample == 2))

    async def main() -> Any:
        return await make(environments, supervisor).start(task(4), 0, [SAMPLING] * 4, tally)

    group = run(main())
    assert [m.sample for m in group.trajectories] == [0, 1, 2, 3] and len(group.usable) == 4
    assert supervisor.replaced == [name] and tally.episodes_restarted == 1 and tally.episodes == 4
    first, again = (order for order in environments.orders if order.sample == 2)
    assert first == again


def test_workers_that_end_under_many_episodes_are_replaced_once():
    supervisor = SupervisorDouble()
    runner = make(Environments(dying("rollout-0", 1)), supervisor)
    groups = run(runner.run_all([(each, [SAMPLING] * 4) for each in [task(n) for n in range(3)]]))
    assert supervisor.replaced == ["rollout-0"] and all(len(group.usable) == 4 for group in groups)


def test_a_new_environment_worker_is_asked_from_then_on():
    environments = Environments(dying("environment-1", 1, of=lambda order: order.task.index == 1), workers=2)
    old = environments.workers[1]

    def successor(name: str) -> None:
        assert name == "environment-1"
        environments.workers[1] = EnvironmentDouble(half, None)

    runner = make(environments, SupervisorDouble(successor=successor))
    groups = run(runner.run_all([(each, [SAMPLING] * 3) for each in [task(n) for n in range(2)]]))
    assert all(len(group.usable) == 3 for group in groups)
    assert len(old.orders) == 3 and [order.sample for order in environments.workers[1].orders] == [0, 1, 2]


def test_an_episode_that_one_worker_keeps_ending_under_is_given_up():
    supervisor, tally = SupervisorDouble(), Tally()
    environments = Environments(dying("environment-0", 99, of=lambda order: order.sample == 1))

    async def main() -> Any:
        return await make(environments, supervisor).start(task(4), 0, [SAMPLING] * 2, tally)

    group = run(main())
    assert group.trajectories[1].error == f"worker `environment-0` ended {EPISODE_ATTEMPTS} times while it ran"
    assert tally.failures == {"worker": 1} and tally.episodes_restarted == EPISODE_ATTEMPTS - 1
    assert len(supervisor.replaced) == EPISODE_ATTEMPTS


def test_an_episode_that_blocks_its_worker_is_given_up_at_once_and_the_others_run_again():
    supervisor, tally = SupervisorDouble(), Tally()
    supervisor.blamed = {("environment-0", "t/4/1")}
    environments = Environments(dying("environment-0", 1))

    async def main() -> Any:
        return await make(environments, supervisor).start(task(4), 0, [SAMPLING] * 3, tally)

    group = run(main())
    assert [m.error_kind for m in group.trajectories] == [None, "blocked", None]
    assert group.trajectories[1].error == "the environment blocks its worker, `environment-0`"
    assert tally.episodes_restarted == 2 and supervisor.replaced == ["environment-0"]


def test_more_deaths_than_are_allowed_end_it():
    with pytest.raises(WorkerDied, match="`rollout-0` died"):
        run(
            make(Environments(dying("rollout-0", 3)), SupervisorDouble(2)).run_all(
                [(each, [SAMPLING] * 1) for each in [task(0)]]
            )
        )


def test_a_silent_worker_is_replaced_like_a_dead_one():
    environments = Environments(lambda order: None)

    def successor(name: str) -> None:
        environments.workers[0] = EnvironmentDouble(half, 1)

    supervisor = SupervisorDouble(successor=successor)
    groups = run(make(environments, supervisor, silence_s=0.05).run_all([(each, [SAMPLING] * 2) for each in [task(0)]]))
    assert len(groups[0].usable) == 2 and supervisor.replaced == ["environment-0"]


def test_ended_groups_take_their_episodes_with_them():
    async def main() -> None:
        environments = Environments(lambda order: None if order.task.index < 2 else half(order), workers=2)
        runner, tally = make(environments), Tally()
        running = [runner.start(task(n), n, [SAMPLING] * 3, tally) for n in range(4)]
        await asyncio.gather(*running[2:])
        assert environments.running == 6 and runner.router.load == [6]
        await runner.end(running[:2])
        await asyncio.sleep(0.01)
        assert environments.running == 0 and runner.router.load == [0]
        assert all(caller.in_flight == 0 for caller in runner._callers.values()) and environments.aborts == 0

    run(main())


def test_a_group_ended_before_it_has_a_place_asks_for_nothing():
    async def main() -> None:
        environments = Environments(lambda order: None)
        runner, tally = make(environments, router=Router(1, capacity=2)), Tally()
        running = [runner.start(task(n), n, [SAMPLING] * 2, tally) for n in range(3)]
        await asyncio.sleep(0.01)
        assert runner.router.waiting == 4
        await runner.end(running[1:])
        assert runner.router.waiting == 0 and runner.router.load == [2] and len(environments.orders) == 2
        await runner.end(running[:1])
        assert runner.router.load == [0]

    run(main())


def test_a_replica_that_retires_gives_its_work_to_the_least_loaded_and_comes_back():
    async def main() -> None:
        environments = Environments(half)
        runner = make(environments, router=Router(3))
        runner.router.load[:] = [0, 4, 2]
        await runner.retire(0)
        assert environments.told == [("reroute", 0, 2)]
        runner.router.load[:] = [0, 0, 0]
        await runner.run_all([(each, [SAMPLING] * 2) for each in [task(n) for n in range(4)]])
        assert {order.replica for order in environments.orders} == {1, 2}
        await runner.enlist(0)
        assert environments.told[-1] == ("reroute", 0, 0)
        environments.workers[0].orders.clear()
        await runner.run_all([(each, [SAMPLING] * 2) for each in [task(n) for n in range(3)]])
        assert {order.replica for order in environments.orders} == {0, 1, 2}

    run(main())


def test_everything_is_ended_even_where_a_worker_is_dead_or_blocked(monkeypatch):
    monkeypatch.setattr(module, "ABORT_LIMIT_S", 0.05)

    class Dead(Environments):
        async def all(self, method: str) -> None:
            raise WorkerDied("gone")

    class Blocked(Environments):
        async def all(self, method: str) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        for environments in (Dead(half), Blocked(half)):
            await make(environments).end_all()

    run(main())


def test_progress_names_the_states():
    runner = make(Environments(half, luck=4), router=Router(1, capacity=4))
    run(runner.run_all([(each, [SAMPLING] * 4) for each in [task(n) for n in range(3)]]))
    assert [numbers[0] for numbers in runner.seen] == list(range(1, 13))
    assert runner.seen[-1] == (12, 12, {"done": 12}, 2)
    assert any(states.get("waiting") for _, _, states, _ in runner.seen)
