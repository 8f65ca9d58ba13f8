"""Runs the samples of groups on the environment workers, whatever becomes of these workers meanwhile.

who waits        for what                                     who unblocks it
a group          room on the replica it will stay on          a sample that is done there (rollout/router.py)
a group          its slowest sample                           that sample's report
an episode       see rollout/states.py                        its worker's report
an episode       a successor of a worker that ended           cluster/supervisor.py; then it runs again
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rollcli.cluster.cluster import Cluster
from rollcli.cluster.mailbox import Caller
from rollcli.cluster.supervisor import Supervisor
from rollcli.data.carriers import Group, Task, Trajectory
from rollcli.engines.base import SamplingParams
from rollcli.errors import WorkerDied
from rollcli.rollout.environment_worker import EpisodeOrder, EpisodeReport
from rollcli.rollout.router import Place, Router
from rollcli.rollout.states import State
from rollcli.rollout.tally import Tally

ABORT_LIMIT_S = 10.0
SHOW_EVERY_S = 0.2
EPISODE_ATTEMPTS = 5
"""An episode during which one and the same worker ended so often is given up: it may well be why."""

Progress = Callable[[int, int, dict[str, int], int], None]
"""Called with samples done, samples admitted, episodes by state, and the longest answer so far."""


class GroupRunner:
    """Drives environment workers from the driver's event loop.

    Args:
        environments: workers that run the episodes.
        router: chooses a replica for each group.
        supervisor: replaces workers that end.
        progress: told of every finished episode.
        silence_s: an episode without an answer for so long, which the worker's own limit should have ended, means that
            its worker no longer works; None waits for ever.
    """

    def __init__(
        self, environments: Cluster, router: Router, supervisor: Supervisor, progress: Progress,
        silence_s: float | None = None,
    ) -> None:  # fmt: skip
        self.environments = environments
        self.router = router
        self.supervisor = supervisor
        self.progress = progress
        self.silence_s = silence_s
        self._callers: dict[int, Caller] = {}
        self._states: dict[int, dict[str, int]] = {}
        self._shown_at = 0.0
        self._orphans: dict[Caller, list[int]] = {}

    def start(self, task: Task, number: int, ways: Sequence[SamplingParams], tally: Tally) -> asyncio.Task[Group]:
        """Starts a group with one sample for each way of sampling; `number` decides its environment worker."""
        tally.groups_started += 1
        tally.samples += len(ways)
        return asyncio.create_task(self._run(task, number, ways, tally))

    async def run_all(self, orders: Sequence[tuple[Task, Sequence[SamplingParams]]]) -> list[Group]:
        """Returns a group for each task and its ways of sampling, whatever came of it: evaluation keeps everything."""
        tally = Tally()
        running = [self.start(task, number, ways, tally) for number, (task, ways) in enumerate(orders)]
        try:
            return list(await asyncio.gather(*running))
        except BaseException:
            await self.end(running)
            raise

    async def end(self, groups: Iterable[asyncio.Task]) -> None:
        """Ends groups that were started, their episodes and requests with them."""
        groups = list(groups)
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        orphans, self._orphans = self._orphans, {}
        for caller, keys in orphans.items():
            # Nobody waits for an answer: an episode that ends by itself meanwhile is dropped as well.
            caller.actor.abort.remote(caller.client, keys)

    async def retire(self, replica: int) -> None:
        """Takes a replica out: what it was answering goes on on another, from the tokens already sampled."""
        self.router.close(replica)
        await self.environments.all("reroute", replica, self.router.least_loaded())

    async def enlist(self, replica: int) -> None:
        """Takes a replica in, whether it is new or was retired."""
        await self.environments.all("reroute", replica, replica)
        self.router.reopen(replica)

    async def end_all(self) -> None:
        """Ends whatever runs on the environment workers."""
        for caller in self._callers.values():
            caller.reset()
        # Whatever is wrong with a worker has been raised already, or will be when it is next needed.
        with contextlib.suppress(WorkerDied, TimeoutError):
            await asyncio.wait_for(self.environments.all("abort_all"), ABORT_LIMIT_S)

    async def _run(self, task: Task, number: int, ways: Sequence[SamplingParams], tally: Tally) -> Group:
        rank = number % len(self.environments)
        async with self.router.place(len(ways)) as place:
            episodes = await asyncio.gather(
                *(self._episode(rank, task, sample, way, place, tally) for sample, way in enumerate(ways))
            )
        greedy = episodes.pop() if len(ways) > 1 and ways[-1].temperature < ways[0].temperature else []
        return Group(task, [trajectory for episode in episodes for trajectory in episode], greedy)

    async def _episode(
        self, rank: int, task: Task, sample: int, sampling: SamplingParams, place: Place, tally: Tally
    ) -> list[Trajectory]:
        """Waits for one sample, makes room for the next and counts it.

        An episode whose worker ends, or the replica or reward worker it uses, runs again with the same seeds.
        """
        ended: Counter[str] = Counter()
        trajectories: list[Trajectory] = []
        while not trajectories:
            await self.supervisor.settled(f"environment-{rank}")
            seen = self.supervisor.snapshot()
            try:
                trajectories = await self._report(rank, EpisodeOrder(task, sample, place.replica, sampling))
            except WorkerDied as error:
                await self.supervisor.replace(error, seen)
                ended[error.worker] += 1
                if self.supervisor.blames(error.worker, f"{task.id}/{sample}"):
                    why = f"the environment blocks its worker, `{error.worker}`"
                    trajectories = [Trajectory.failed(task, sample, "blocked", why)]
                elif ended[error.worker] == EPISODE_ATTEMPTS:
                    why = f"worker `{error.worker}` ended {EPISODE_ATTEMPTS} times while it ran"
                    trajectories = [Trajectory.failed(task, sample, "worker", why)]
                else:
                    tally.episodes_restarted += 1
        place.give_back()
        tally.take(trajectories)
        self._show(tally)
        return trajectories

    async def _report(self, rank: int, order: EpisodeOrder) -> list[Trajectory]:
        """Returns an environment worker's report of one episode.

        Raises:
            WorkerDied: the worker ended or is silent, or one that the episode used ended.
        """
        caller = self._caller(rank)
        key, future = caller.start(order)
        try:
            async with asyncio.timeout(self.silence_s):
                report: EpisodeReport = await future
        except TimeoutError:
            raise WorkerDied(
                f"worker `environment-{rank}` has not answered for {self.silence_s:g} s: `{order.task.id}`, or an "
                "episode beside it, blocks it",
                hint="an environment's methods must await what takes long; wrap blocking calls in `asyncio.to_thread`",
                worker=f"environment-{rank}",
                silent=True,
            ) from None
        except asyncio.CancelledError:
            self._orphans.setdefault(caller, []).append(key)
            raise
        finally:
            caller.forget(key)
        if report.error is not None:
            raise report.error
        self._states[rank] = report.states
        return report.trajectories

    def _caller(self, rank: int) -> Caller:
        """Returns how an environment worker is asked: the one that is there now, whoever saw to its succession."""
        actor = self.environments.workers[rank]
        if rank not in self._callers or self._callers[rank].actor is not actor:
            self._callers[rank] = Caller(actor, "scheduler", f"environment-{rank}")
        return self._callers[rank]

    def _show(self, tally: Tally) -> None:
        """Tells how it stands, now and then: with thousands under way, counting for each would be half the work."""
        now = time.monotonic()
        if tally.episodes < tally.samples and now - self._shown_at < SHOW_EVERY_S:
            return
        self._shown_at = now
        failed = tally.failures.total()
        states = Counter({State.DONE.value: tally.episodes - failed, State.FAILED.value: failed})
        states[State.WAITING.value] = self.router.waiting
        for counts in self._states.values():
            states.update(counts)
        self.progress(tally.episodes, tally.samples, dict(+states), tally.longest)
