"""Replacing workers, with real actors and real signals: once, by name, within a limit, and with the cause."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from rollcli.cluster import supervisor as module
from rollcli.cluster.autopsy import Autopsy, note_path
from rollcli.cluster.cluster import Cluster, worker_specs
from rollcli.cluster.placement import ResourcePool
from rollcli.cluster.supervisor import Supervisor
from rollcli.errors import ModelNotFound, WorkerDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LIMIT_S = 60
KILLED = "was killed (SIGKILL, by hand or by the system), or left without a word"


class Member:
    """A worker without a recipe, whose loop or engine can be made to hang."""

    def __init__(self, spec: Any) -> None:
        folder = Path(spec.folder)
        (folder / f"{spec.name}-{time.monotonic_ns()}").touch()
        if (folder / "refuses").exists():
            raise ModelNotFound("no model `x`")
        if (folder / "dies").exists():
            (folder / "dies").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.spec = spec
        self.stuck = 0.0

    async def ready(self) -> int:
        return os.getpid()

    async def wait(self) -> None:
        await asyncio.sleep(1e6)

    async def block(self) -> None:
        time.sleep(1e6)

    async def be_stuck(self, seconds: float) -> None:
        self.stuck = seconds

    async def stuck_s(self) -> float:
        return self.stuck


class Watched:
    """A cluster in a supervisor's charge, what it was told, and which new workers were prepared."""

    def __init__(self, folder: Path, role: str, count: int = 2, limit: int = 20, hang_s: float = 60.0) -> None:
        self.folder, self.told, self.prepared = folder, [], []
        self.cluster = Cluster(Member, worker_specs(role, count, 1, {}, str(folder), str(folder)), ResourcePool({}))
        self.supervisor = Supervisor(Autopsy(folder), limit, self.told.append, hang_s)
        self.supervisor.add(self.cluster, self.prepare)

    async def prepare(self, rank: int) -> None:
        self.prepared.append(rank)

    async def pids(self) -> list[int]:
        return await self.cluster.all("ready")

    async def lose(self, rank: int, how: int = signal.SIGKILL) -> tuple[WorkerDied, Counter]:
        """Kills a worker in the middle of a call; returns what the caller gets, and its snapshot."""
        seen = self.supervisor.snapshot()
        call = asyncio.create_task(self.cluster.gather([self.cluster.workers[rank].wait.remote()]))
        pids = await self.pids()
        os.kill(pids[rank], how)
        with pytest.raises(WorkerDied) as caught:
            await call
        return caught.value, seen

    def births(self) -> int:
        return len(list(self.folder.glob(f"{self.cluster.role}-*-*")))


@pytest.fixture
def watched(ray, tmp_path, request):
    made: list[Watched] = []

    def make(**options: Any) -> Watched:
        made.append(Watched(tmp_path, f"w{abs(hash(request.node.name)) % 10**8}", **options))
        return made[-1]

    yield make
    for each in made:
        each.cluster.kill()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def test_a_killed_worker_is_replaced_once_however_many_notice(watched):
    async def main() -> None:
        held = watched()
        await held.cluster.ready()
        before = await held.pids()
        seen = held.supervisor.snapshot()
        name = f"{held.cluster.role}-1"
        calls = [asyncio.create_task(held.cluster.gather([held.cluster.workers[1].wait.remote()])) for _ in range(8)]
        await held.pids()
        os.kill(before[1], signal.SIGKILL)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert {error.worker for error in errors} == {name}
        await asyncio.gather(*(held.supervisor.replace(error, seen) for error in errors))
        # One that slept through it all.
        await held.supervisor.replace(errors[0], seen)
        after = await held.pids()
        assert after[0] == before[0] and after[1] != before[1] and held.births() == 3
        assert held.prepared == [1] and held.supervisor.replaced == 1
        assert held.told == [f"worker `{name}` {KILLED}; a new one takes its place"]
        # The next death is another one.
        await held.supervisor.replace(*await held.lose(1))
        assert held.prepared == [1, 1] and held.supervisor.snapshot() == {name: 2}

    run(main())


def test_two_of_a_role_at_once(watched):
    async def main() -> None:
        held = watched()
        before = await held.pids()
        lost = [await held.lose(0)]
        held_1 = asyncio.create_task(held.supervisor.replace(*lost[0]))
        await asyncio.sleep(0)
        seen = held.supervisor.snapshot()
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            await held.cluster.gather([held.cluster.workers[1].wait.remote()])
        await asyncio.gather(held_1, held.supervisor.replace(caught.value, seen))
        assert sorted(held.prepared) == [0, 1] and not set(before) & set(await held.pids())

    run(main())


def test_the_limit_of_an_hour_stops_with_the_cause(watched, monkeypatch):
    async def main() -> None:
        held = watched(count=1, limit=2)
        await held.supervisor.replace(*await held.lose(0))
        await held.supervisor.replace(*await held.lose(0))
        error, seen = await held.lose(0)
        with pytest.raises(WorkerDied) as caught:
            await held.supervisor.replace(error, seen)
        assert caught.value.message == (
            f"worker `{error.worker}` {KILLED}; 2 workers were replaced in the "
            "last hour, and `rollout.max_restarts_per_hour` is 2"
        )
        assert caught.value.worker == error.worker and held.supervisor.replaced == 2
        # What is longer ago does not count.
        monkeypatch.setattr(module, "HOUR_S", 0.0)
        await held.supervisor.replace(error, seen)
        assert held.supervisor.replaced == 3

    run(main())


def test_a_limit_of_none_replaces_nobody(watched):
    async def main() -> None:
        held = watched(count=1, limit=0)
        with pytest.raises(WorkerDied, match="0 workers were replaced in the last hour"):
            await held.supervisor.replace(*await held.lose(0))
        assert held.births() == 1

    run(main())


def test_one_that_is_killed_before_it_is_fit_for_work_has_a_successor_too(watched):
    async def main() -> None:
        held = watched(count=1)
        await held.cluster.ready()
        lost = await held.lose(0)
        # The first successor ends while it starts, the second while it is prepared.
        (held.folder / "dies").touch()

        async def prepare(rank: int) -> None:
            held.prepared.append(rank)
            if len(held.prepared) == 1:
                await held.lose_quietly()

        async def lose_quietly() -> None:
            error, _ = await held.lose(0)
            raise error

        held.lose_quietly = lose_quietly
        held.supervisor.add(held.cluster, prepare)
        await held.supervisor.replace(*lost)
        await held.pids()
        assert held.births() == 4 and held.prepared == [0, 0] and len(held.told) == 3
        assert held.supervisor.snapshot() == {lost[0].worker: 1}

    run(main())


def test_one_that_cannot_start_ends_the_run_with_the_reason(watched):
    async def main() -> None:
        held = watched(count=1)
        await held.cluster.ready()
        lost = await held.lose(0)
        (held.folder / "refuses").touch()
        with pytest.raises(WorkerDied, match="did not start: ModelNotFound: no model `x`"):
            await held.supervisor.replace(*lost)
        assert held.births() == 2

    run(main())


@pytest.mark.parametrize("name", ["policy-0", "", "of another role"])
def test_one_that_is_not_in_its_charge_is_raised(name):
    supervisor = Supervisor(Autopsy(None), 20, print, 60.0)
    error = WorkerDied("gone", worker=name)
    with pytest.raises(WorkerDied) as caught:
        run(supervisor.replace(error, supervisor.snapshot()))
    assert caught.value is error


def test_the_episode_that_blocked_a_worker_is_blamed(watched):
    async def main() -> None:
        held = watched(count=1)
        name = f"{held.cluster.role}-0"
        lost = await held.lose(0)
        note_path(held.folder, name).write_text("t/3/1\n")
        await held.supervisor.replace(*lost)
        assert held.supervisor.blames(name, "t/3/1")
        assert not held.supervisor.blames(name, "t/3/2") and not held.supervisor.blames("other-0", "t/3/1")
        assert "an episode blocked it" in held.told[0]

    run(main())


@pytest.fixture
def soon(monkeypatch) -> None:
    monkeypatch.setattr(module, "PING_EVERY_S", 0.2)
    monkeypatch.setattr(module, "MARGIN_S", 0.2)


@pytest.mark.parametrize("how", ["the loop is blocked", "the engine is stuck", "the process is stopped"])
def test_a_hung_worker_is_ended_and_its_callers_notice(watched, soon, how):
    async def main() -> None:
        held = watched(hang_s=1.5)
        await held.cluster.ready()
        before = await held.pids()
        seen = held.supervisor.snapshot()
        held.supervisor.watch()
        waiting = asyncio.create_task(held.cluster.gather([held.cluster.workers[0].wait.remote()]))
        await held.pids()
        if how == "the loop is blocked":
            held.cluster.workers[0].block.remote()
        elif how == "the engine is stuck":
            await held.cluster.workers[0].be_stuck.remote(1.75)
        else:
            os.kill(before[0], signal.SIGSTOP)
        with pytest.raises(WorkerDied) as caught:
            await waiting
        await held.supervisor.replace(caught.value, seen)
        after = await held.pids()
        assert after[0] != before[0] and after[1] == before[1]
        assert len(held.told) == 1 and "did nothing for 1." in held.told[0] and "and was ended" in held.told[0]
        # One that is busy for less than that is left alone, and so is everyone once the watch is over.
        await held.cluster.workers[0].be_stuck.remote(1.4)
        await asyncio.sleep(1.0)
        await held.supervisor.close()
        await held.cluster.workers[1].be_stuck.remote(9.0)
        await asyncio.sleep(0.6)
        assert await held.pids() == after
        await held.supervisor.close()

    run(main())


def test_one_that_is_being_replaced_is_not_pinged(soon):
    async def main() -> None:
        worker = SimpleNamespace()  # has no method to call
        cluster = SimpleNamespace(role="w", workers=[worker], __len__=lambda: 1)
        supervisor = Supervisor(Autopsy(None), 20, print, 0.5)
        supervisor.add(cluster, None)
        lock = supervisor._clusters["w"].locks[0] = asyncio.Lock()
        async with lock:
            await supervisor._ping("w", 0)
        with pytest.raises(AttributeError):
            await supervisor._ping("w", 0)

    run(main())


def test_who_asks_waits_until_a_successor_is_fit_for_work() -> None:
    async def main() -> list[str]:
        said: list[str] = []
        supervisor = Supervisor(Autopsy(None), 3, said.append, 60.0)
        cluster = SimpleNamespace(role="environment")
        supervisor.add(cluster, None)
        await supervisor.settled("environment-0")
        lock = supervisor._clusters["environment"].locks.setdefault(0, asyncio.Lock())
        await lock.acquire()
        waiting = asyncio.ensure_future(supervisor.settled("environment-0"))
        await supervisor.settled("environment-1")
        await supervisor.settled("nobody-0")
        await asyncio.sleep(0)
        assert not waiting.done()
        lock.release()
        await waiting
        return said

    assert asyncio.run(main()) == []
