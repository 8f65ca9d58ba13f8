"""The rollout scheduler: admits groups, and hands over batches of those worth training on.

    TaskStream ─admit─▶ environment workers ─▶ replicas ─▶ rewards ─▶ Group ─keep?─▶ buffer ─▶ batch
                ▲             ▲                                        │ no
         rollout/admission.py └──────────── one more group ◀───────────┘

    who waits        for what                                        who unblocks it
    collect          enough finished groups, none of them overdue    the last group that ends
    a group          see rollout/groups.py
    an episode       see rollout/states.py

Groups are admitted whenever the bound on staleness leaves room: in `collect`, when a group is refused, when a batch is
taken, and when the replicas have a new version. With `max_staleness: 0` that is only while a batch is collected, and
then, without `extra_groups`, luck does not matter: a batch is all kept groups of those admitted, exactly as many as
needed, since each refused group admits exactly one more; and groups are sorted by draw. So the batch is a function of
policy and cursor, whatever the number of replicas or workers, the speed of episodes, or the workers that die meanwhile.

What a checkpoint keeps is the cursor of the task stream and the draws that wait to be trained. After a resume those
are sampled again, so every draw is trained once, or counted as dropped with a reason.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollcli.config.schema import TaskConfig
from rollcli.data.carriers import Group, Task
from rollcli.data.stream import TaskStream
from rollcli.engines.base import SamplingParams
from rollcli.errors import RolloutError
from rollcli.rollout.admission import Admission
from rollcli.rollout.groups import GroupRunner
from rollcli.rollout.tally import Tally


@dataclass(frozen=True)
class Rules:
    """What a group is, and when the search for groups is given up.

    Attributes:
        group_size: samples of a group.
        max_group_attempts: groups started per group needed before `collect` gives up.
        max_failure_share: share of failed episodes above which it gives up.
        keep_group: says whether a finished group is worth training on.
        smallest_group: fewer usable samples make a group a failed one.
        greedy_baseline: gives each group one more sample, greedy, which is kept apart.
        tasks: the recipe's, whose own group sizes and budgets come first.
    """

    group_size: int
    max_group_attempts: int
    max_failure_share: float
    keep_group: Callable[[Group], bool]
    smallest_group: int = 1
    greedy_baseline: bool = False
    tasks: Sequence[TaskConfig] = ()

    def ways(self, name: str, sampling: SamplingParams) -> list[SamplingParams]:
        """Returns how each episode of a group of task `name` is sampled."""
        config = next((task for task in self.tasks if task.name == name), None)
        if config is not None:
            sampling = task_sampling(config, sampling)
        ways = [sampling] * ((config and config.group_size) or self.group_size)
        return [*ways, replace(sampling, temperature=0.0)] if self.greedy_baseline else ways

    @property
    def largest_group(self) -> int:
        """Episodes of the largest group."""
        return max((task.group_size or self.group_size for task in self.tasks), default=self.group_size)


def task_sampling(config: TaskConfig, sampling: SamplingParams) -> SamplingParams:
    """Returns `sampling` with what a task's own block says in its place."""
    own = {name: value for name, value in vars(config.sampling).items() if value is not None}
    return replace(sampling, **own)


@dataclass
class Flight:
    """A group that was admitted and is not trained yet; `group` when it has ended and is kept."""

    task: Task
    work: asyncio.Task[Group]
    group: Group | None = None


class Scheduler:
    """Collects batches.

    Args:
        runner: runs groups.
        stream: where tasks come from.
        admission: how far ahead of training sampling may run.
        rules: what a group is.
    """

    def __init__(self, runner: GroupRunner, stream: TaskStream, admission: Admission, rules: Rules) -> None:
        self.runner = runner
        self.stream = stream
        self.admission = admission
        self.rules = rules
        self.tally = Tally()
        self._counting = Tally()
        self._sampling: SamplingParams | None = None
        self._flights: dict[int, Flight] = {}
        self._returned: deque[Task] = deque()
        self._refused: list[Task] = []
        self._outcomes: dict[int, tuple[Task, float]] = {}
        self._numbers = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def collect(self, sampling: SamplingParams) -> list[Group]:
        """Returns the next batch, in the order its groups were drawn; `tally` is then of this batch.

        Raises:
            RolloutError: too many groups were refused, or too many episodes failed; the message shows the numbers.
            WorkerDied: more workers ended than may be replaced.
        """
        self._sampling = sampling
        try:
            self._admit()
            while (chosen := self._batch()) is None:
                await self._changed.wait()
                self._changed.clear()
            groups = [self._flights.pop(number).group for number in chosen]
            self.admission.take(chosen)
            self._check_batch(groups)
            if self.admission.max_staleness == 0:
                await self._give_up_the_rest()
        except BaseException:
            await self.abandon()
            raise
        # In the order of draws, whatever the order they ended in; those that wait are learned when they are trained.
        settled = sorted(number for number in self._outcomes if number not in self._flights)
        self.stream.learn(self._outcomes.pop(number) for number in settled)
        self._refused.clear()
        self.tally = self._counting.cut()
        self._admit()
        return groups

    def serve(self, version: int) -> None:
        """Learns that the replicas now sample with `version` of the policy, which may leave room for more groups."""
        self.admission.version = version
        if self._sampling is not None and self.admission.max_staleness > 0:
            self._admit()

    async def abandon(self) -> None:
        """Ends everything under way: after an error, or because the run is to stop."""
        # Forgotten first: a group that ends meanwhile must not start another.
        flights, self._flights = self._flights, {}
        await self.runner.end(flight.work for flight in flights.values())
        await self.runner.end_all()

    def metrics(self) -> dict[str, float]:
        """Returns the counts of the last batch, and how many groups wait for later ones."""
        buffered = sum(flight.group is not None for flight in self._flights.values())
        waiting = {"groups_buffered": float(buffered), "groups_in_flight": float(len(self._flights) - buffered)}
        return self.tally.metrics() | waiting

    def state(self) -> dict[str, Any]:
        """Returns the cursor: the stream's, and the draws that wait to be trained.

        Draws refused since the last batch are among them: no step has counted them yet.
        """
        waiting = [flight.task for _, flight in sorted(self._flights.items())]
        pending = [[task.name, task.index, task.row] for task in (*self._returned, *self._refused, *waiting)]
        return {"stream": self.stream.state(), "pending": pending, "number": self._numbers}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Goes on from a cursor, before step `step`; draws that waited to be trained are sampled again.

        Raises:
            CheckpointError: the tasks or their content are not those of the checkpoint.
        """
        self.stream.restore(state["stream"])
        self._returned = deque(self.stream.task(*draw) for draw in state["pending"])
        self._numbers = state["number"]
        self.admission.version = self.admission.next_step = step

    def _batch(self) -> list[int] | None:
        if self._failure is not None:
            raise self._failure
        return self.admission.batch(number for number, flight in self._flights.items() if flight.group is not None)

    def _admit(self) -> None:
        """Starts as many groups as there is room for."""
        for _ in range(self.admission.room()):
            progress = self.admission.next_step / self.admission.steps
            again = bool(self._returned)
            task = self._returned.popleft() if again else self.stream.draw(progress)
            number, self._numbers = self._numbers, self._numbers + 1
            # In a synchronous run a problem comes again because its group was given up.
            self.admission.admit(number, urgent=again and self.admission.max_staleness == 0)
            ways = self.rules.ways(task.name, self._sampling)
            self._flights[number] = Flight(task, self.runner.start(task, number, ways, self._counting))
            self._flights[number].work.add_done_callback(lambda work, number=number: self._landed(number, work))

    def _landed(self, number: int, work: asyncio.Task[Group]) -> None:
        """Takes a group in whose episodes have all ended: it is kept, or another is started in its place."""
        if number not in self._flights:
            return
        self._changed.set()
        if work.cancelled():
            self._failure = self._failure or RolloutError("a group was cancelled from outside", hint="report this bug")
            return
        if work.exception() is not None:
            self._failure = self._failure or work.exception()
            return
        flight, group = self._flights[number], work.result()
        if group.usable:
            accuracies = [trajectory.accuracy for trajectory in group.usable]
            self._outcomes[number] = (flight.task, sum(accuracies) / len(accuracies))
        reason = self._refusal(group)
        if reason is None:
            flight.group = group
            self._counting.groups_kept += 1
            return
        del self._flights[number]
        self.admission.withdraw(number)
        self._refused.append(flight.task)
        try:
            self._count_refusal(reason, group)
            self._admit()
        except RolloutError as error:
            self._failure = self._failure or error
        except BaseException as error:
            # A source that fails: whoever waits in `collect` must hear of it, and the loop's log shows where.
            self._failure = self._failure or error
            raise

    def _refusal(self, group: Group) -> str | None:
        """Returns why a group is not trained on, or None."""
        spoiled = any(trajectory.spoils_group for trajectory in group.trajectories)
        greedy_failed = not all(baseline.usable for baseline in group.greedy)
        if spoiled or greedy_failed or len(group.usable) < self.rules.smallest_group:
            return "failed"
        # Of several players' groups one that teaches something is enough.
        if any(self.rules.keep_group(each) for each in group.by_agent()):
            return None
        right = {trajectory.accuracy > 0.5 for trajectory in group.usable}
        return {(True,): "all right", (False,): "all wrong"}.get(tuple(right), "refused by the algorithm")

    def _count_refusal(self, reason: str, group: Group) -> None:
        tally, needed = self._counting, self.admission.per_step
        tally.groups_refused[reason] += 1
        tally.refused_episodes += len(group.by_episode())
        tally.refused_failures += group.failed_episodes
        # Too many even for a batch that takes as many groups as may be tried: waiting is in vain, whatever order the
        # others end in. Where nothing but failures has come, it is so sooner: even if all that still come are kept.
        size, refused = self.rules.largest_group, tally.groups_refused
        only_failures = not tally.groups_kept and refused["failed"] == refused.total() >= needed
        most = needed + refused.total() if only_failures else needed * self.rules.max_group_attempts
        tally.check_failures(self.rules.max_failure_share, tally.refused_failures, most * size, ended=False)
        tally.check_attempts(needed, self.rules.max_group_attempts)

    def _check_batch(self, groups: list[Group]) -> None:
        """Judges a batch by the groups it consists of and those refused on the way, not by what else has ended."""
        tally = self._counting
        failed = tally.refused_failures + sum(group.failed_episodes for group in groups)
        episodes = tally.refused_episodes + sum(len(group.by_episode()) for group in groups)
        tally.check_failures(self.rules.max_failure_share, failed, episodes)

    async def _give_up_the_rest(self) -> None:
        """Ends groups that were started beyond the need; their problems come again."""
        rest = sorted(self._flights.items())
        if rest:
            self._flights.clear()
            await self.runner.end(flight.work for _, flight in rest)
            for number, _ in rest:
                self.admission.withdraw(number)
                self._outcomes.pop(number, None)
            self._returned.extendleft(flight.task for _, flight in reversed(rest))
            self._counting.groups_aborted += len(rest)
            self._counting.samples = self._counting.episodes
