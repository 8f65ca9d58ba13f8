"""The rollout scheduler: admits groups, follows every sample, and hands over a batch of groups worth training on.

    TaskStream ─admit─▶ environment workers ─▶ replicas ─▶ rewards ─▶ Group ─keep?─▶ batch
                              ▲                                        │ no
                              └──────────── one more group ◀───────────┘

    who waits        for what                                        who unblocks it
    collect          every admitted group to finish                  the last episode's report
    a group          its slowest sample                              that sample's report
    a group          room on the replica it will stay on              a sample that is done there (rollout/router.py)
    an episode       see rollout/states.py

The order of luck does not matter: a batch is all kept groups of those admitted, exactly as many as needed, since each
refused group admits exactly one more; and groups are sorted by draw. So the batch is a function of policy and cursor,
whatever the number of replicas or workers or the speed of episodes.

The cursor of the task stream moves when a group is admitted. A caller that gives up in the middle restores the cursor
it had before, and the same groups are drawn again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rollcli.cluster.cluster import Cluster
from rollcli.cluster.mailbox import Caller
from rollcli.data.carriers import Group, Task, Trajectory
from rollcli.data.stream import TaskStream
from rollcli.engines.base import SamplingParams
from rollcli.errors import RolloutError, WorkerDied
from rollcli.rollout.environment_worker import EpisodeOrder, EpisodeReport
from rollcli.rollout.router import Place, Router
from rollcli.rollout.states import State

ABORT_LIMIT_S = 10.0

Progress = Callable[[int, int, dict[str, int], int], None]
"""Called with samples done, samples admitted, episodes by state, and the longest answer so far."""


@dataclass
class Tally:
    """What happened while one batch was collected."""

    groups_started: int = 0
    groups_refused: Counter[str] = field(default_factory=Counter)
    episodes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def metrics(self) -> dict[str, float]:
        """Returns the counts as metrics."""
        return {
            "groups_started": float(self.groups_started),
            "groups_rejected": float(self.groups_refused.total()),
            "failed": float(self.failures.total()),
            **{f"failed/{kind}": float(count) for kind, count in sorted(self.failures.items())},
        }


class Scheduler:
    """Drives environment workers from the driver's event loop."""

    def __init__(
        self, environments: Cluster, router: Router, *, group_size: int, max_group_attempts: int,
        max_failure_share: float, keep_group: Callable[[Group], bool], smallest_group: int, progress: Progress,
        silence_s: float | None = None, greedy_baseline: bool = False,
    ) -> None:  # fmt: skip
        """Starts nothing.

        Args:
            environments: workers that run the episodes.
            router: chooses a replica for each group.
            group_size: samples of a group.
            max_group_attempts: groups started per group needed before `collect` gives up.
            max_failure_share: share of failed episodes above which it gives up.
            keep_group: says whether a finished group is worth training on.
            smallest_group: fewer usable samples make a group a failed one.
            progress: told of every finished episode.
            silence_s: an episode without an answer for so long, which the worker's own limit should have ended, means
                that its worker no longer works; None waits for ever.
            greedy_baseline: gives each group to train on one more sample, greedy, which is kept apart.
        """
        self.environments = environments
        self.router = router
        self.group_size = group_size
        self.max_group_attempts = max_group_attempts
        self.max_failure_share = max_failure_share
        self.keep_group = keep_group
        self.smallest_group = smallest_group
        self.progress = progress
        self.silence_s = silence_s
        self.greedy_baseline = greedy_baseline
        self.tally = Tally()
        self._callers = [
            Caller(worker, "scheduler", f"environment-{rank}") for rank, worker in enumerate(environments.workers)
        ]
        self._states: dict[int, dict[str, int]] = {}
        self._admitted = self._longest = 0

    async def collect(self, stream: TaskStream, count: int, sampling: SamplingParams) -> list[Group]:
        """Returns `count` groups worth training on, in the order they were drawn.

        Raises:
            RolloutError: too many groups were refused, or too many episodes failed; the message shows the numbers.
        """
        self._begin()
        kept: list[tuple[int, Group]] = []
        failures = 0
        running = {self._admit(stream.draw(), number, sampling) for number in range(count)}
        try:
            while running:
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for number, group in (task.result() for task in finished):
                    reason = self._refusal(group)
                    if reason is None:
                        kept.append((number, group))
                        continue
                    self.tally.groups_refused[reason] += 1
                    # Were every group that still comes to succeed, would too many have failed? Then waiting is in vain.
                    failures += len(group.trajectories) - len(group.usable)
                    self._check_failures(failures, (count + self.tally.groups_refused.total()) * self.group_size)
                    self._check_attempts(count)
                    running.add(self._admit(stream.draw(), self.tally.groups_started, sampling))
        except BaseException:
            await self._abandon(running)
            raise
        self._check_failures(self.tally.failures.total(), self.tally.episodes)
        return [group for _, group in sorted(kept, key=lambda item: item[0])]

    async def run_tasks(self, tasks: Sequence[Task], samples: int, sampling: SamplingParams) -> list[Group]:
        """Returns one group for each of `tasks`, whatever came of it: evaluation keeps everything."""
        self._begin()
        running = {self._admit(task, number, sampling, samples) for number, task in enumerate(tasks)}
        try:
            results = await asyncio.gather(*running)
        except BaseException:
            await self._abandon(running)
            raise
        self._check_failures(self.tally.failures.total(), self.tally.episodes)
        return [group for _, group in sorted(results, key=lambda item: item[0])]

    def _begin(self) -> None:
        self.tally = Tally()
        self._states.clear()
        self._admitted = self._longest = 0

    def _admit(
        self, task: Task, number: int, sampling: SamplingParams, samples: int | None = None
    ) -> asyncio.Task[tuple[int, Group]]:
        """Starts one group."""
        to_train = samples is None
        ways = [sampling] * (self.group_size if to_train else samples)
        if to_train and self.greedy_baseline:
            ways.append(replace(sampling, temperature=0.0))
        self.tally.groups_started += 1
        self._admitted += len(ways)
        return asyncio.create_task(self._follow(task, number, ways))

    async def _follow(self, task: Task, number: int, ways: list[SamplingParams]) -> tuple[int, Group]:
        """Waits for every sample of one group; each has its way of sampling."""
        rank = number % len(self._callers)
        async with self.router.place(len(ways)) as place:
            orders = [EpisodeOrder(task, sample, place.replica, way) for sample, way in enumerate(ways)]
            trajectories = await asyncio.gather(*(self._episode(rank, order, place) for order in orders))
        greedy = trajectories.pop() if len(ways) > 1 and ways[-1].temperature < ways[0].temperature else None
        return number, Group(task, trajectories, greedy)

    async def _episode(self, rank: int, order: EpisodeOrder, place: Place) -> Trajectory:
        """Waits for one sample, makes room for the next and counts it."""
        try:
            async with asyncio.timeout(self.silence_s):
                report: EpisodeReport = await self._callers[rank].call(order)
        except TimeoutError:
            raise WorkerDied(
                f"worker `environment-{rank}` has not answered for {self.silence_s:g} s: `{order.task.id}`, or an "
                "episode beside it, blocks it",
                hint="an environment's methods must await what takes long; wrap blocking calls in `asyncio.to_thread`",
            ) from None
        place.give_back()
        if report.error is not None:
            raise report.error
        self._states[rank] = report.states
        self._take(report.trajectory)
        return report.trajectory

    def _take(self, trajectory: Trajectory) -> None:
        self.tally.episodes += 1
        if not trajectory.usable:
            self.tally.failures[trajectory.error_kind or "unknown"] += 1
            self.tally.example = self.tally.example or f"{trajectory.task_id}: {trajectory.error}"
        self._longest = max(self._longest, trajectory.response_tokens)
        failed = self.tally.failures.total()
        states = Counter({State.DONE.value: self.tally.episodes - failed, State.FAILED.value: failed})
        states[State.WAITING.value] = self.router.waiting
        for counts in self._states.values():
            states.update(counts)
        self.progress(self.tally.episodes, self._admitted, dict(+states), self._longest)

    def _refusal(self, group: Group) -> str | None:
        """Returns why a group is not trained on, or None."""
        if len(group.usable) < self.smallest_group or (group.greedy is not None and not group.greedy.usable):
            return "failed"
        if self.keep_group(group):
            return None
        right = {trajectory.accuracy > 0.5 for trajectory in group.usable}
        return {(True,): "all right", (False,): "all wrong"}.get(tuple(right), "refused by the algorithm")

    def _check_attempts(self, count: int) -> None:
        if self.tally.groups_started < count * self.max_group_attempts:
            return
        refused = self.tally.groups_refused
        shares = ", ".join(f"{number / refused.total():.0%} {reason}" for reason, number in refused.most_common())
        raise RolloutError(
            f"{self.tally.groups_started} groups were sampled for a batch of {count} and too few are worth training "
            f"on; of those refused: {shares}",
            hint="choose problems of other difficulty, raise `rollout.max_group_attempts`, or switch "
            "`algorithm.dynamic_sampling` off"
            + (f"; first failure: {self.tally.example}" if self.tally.example else ""),
        )

    def _check_failures(self, failures: int, episodes: int) -> None:
        if failures > self.max_failure_share * episodes:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.tally.failures.most_common(3))
            raise RolloutError(
                f"{self.tally.failures.total()} of {self.tally.episodes} episodes failed ({kinds}); "
                f"first: {self.tally.example}",
                hint="mend the cause, or allow more with `rollout.max_failure_share`",
            )

    async def _abandon(self, running: set[asyncio.Task]) -> None:
        """Ends what is still running: after an error, or because the caller was told to stop."""
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for caller in self._callers:
            caller.reset()
        # Whatever is wrong with a worker has been raised already, or will be when it is next needed.
        with contextlib.suppress(WorkerDied, TimeoutError):
            await asyncio.wait_for(self.environments.all("abort_all"), ABORT_LIMIT_S)
