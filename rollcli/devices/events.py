"""Steps of a run, event by event: groups admitted, decoded by continuous batching, scored, trained on.

    admit ─▶ place on a replica ─▶ decode ⇄ environment ─▶ reward ─▶ group ─keep?─▶ batch ─▶ train ─▶ sync ─┐
      ▲                                                                │ no                                 │
      └────────────────────────────────────────────────────────────────┴────────────────────────────────────┘

It follows the runtime: admission as in rollout/admission.py, placement as in rollout/router.py (a group on the least
loaded replica, first come, first served), the step as in pipelines/rl.py. Rows decode as replicas.py says.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque

import numpy as np

from rollcli.devices.lengths import Fixed, draw_groups
from rollcli.devices.replicas import Replicas
from rollcli.devices.workload import Schedule, Segment, Speeds, Trace, Work

READY, SCORED, TRAINER, REPLICA = range(4)


class Group:
    """Samples of one prompt, on one replica."""

    __slots__ = ("admitted", "due", "left", "lengths", "refused", "replica", "squares", "tokens", "urgent")

    def __init__(self, lengths: list[float], refused: bool) -> None:
        self.lengths = lengths
        self.refused = refused
        self.urgent = False
        self.begin(0, 0)

    def begin(self, version: int, due: int) -> None:
        """Is admitted under a version, and due at a step."""
        self.admitted, self.due, self.left = version, due, len(self.lengths)
        self.tokens = self.squares = 0.0


class Run:
    """One simulated run; `trace` after `run`."""

    def __init__(self, work: Work, speeds: Speeds, schedule: Schedule) -> None:
        self.work, self.speeds, self.plan = work, speeds, schedule
        self.luck = np.random.default_rng(schedule.seed)
        self.events: list[tuple] = []
        self.numbers = itertools.count()
        self.replicas = Replicas(speeds, schedule, lambda at, which, stamp: self._at(at, REPLICA, which, stamp))
        self.load = [0] * schedule.replicas
        self.least = [(0, replica) for replica in range(schedule.replicas)]
        self.waiting: deque[Group] = deque()  # admitted, without a place
        self.drawn: deque[Group] = deque()
        self.returned: deque[Group] = deque()
        self.flights: set[Group] = set()
        self.due: dict[int, int] = {}  # step: groups that are due at it and not trained
        self.finished: dict[int, deque[Group]] = {}
        self.urgent = 0
        self.version = self.next_step = 0
        self.collecting, self.now, self.since = False, 0.0, 0.0
        self.trace, self.began, self.counting = Trace(), 0.0, schedule.warmup == 0
        self.plain, self.scores = work.turns == Fixed(1), work.reward_s != Fixed(0)
        self.tail_from: float | None = None

    def run(self) -> Trace:
        """Runs to the end of the last counted step."""
        self._synchronize()
        events = self.events
        while len(self.trace.ends) < self.plan.steps:
            self.now, _, kind, what, stamp = heapq.heappop(events)
            if kind == REPLICA:
                if stamp == self.replicas.stamp[what]:
                    self._replica(what)
            elif kind == SCORED:
                self._scored(what)
            elif kind == READY:
                self._ready(what)
            else:
                self._trainer(what)
        return self.trace

    def _at(self, time: float, kind: int, what: object, stamp: int = 0) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), kind, what, stamp))

    # Sampling

    def _replica(self, replica: int) -> None:
        """Rows end: each is a turn, the last of an episode or not."""
        for sample in self.replicas.ended(replica, self.now):
            self.trace.requests += self.counting
            sample[1] -= 1
            if sample[1] > 0:
                environment_s = float(self.work.environment_s.at(self.luck.standard_normal()))
                self._at(self.now + environment_s, READY, sample)
            else:
                self._leave(replica)
                reward_s = float(self.work.reward_s.at(self.luck.standard_normal())) if self.scores else 0.0
                if reward_s > 0:
                    self._at(self.now + reward_s, SCORED, sample)
                else:
                    self._scored(sample)
        self._place()
        self.replicas.schedule(replica, self.now)
        if self.tail_from is None and 2 * self.replicas.busy < self.plan.replicas:
            self.tail_from = self.now

    def _ready(self, sample: list) -> None:
        """The environment has answered: the next turn begins, in the place that the episode kept."""
        if sample[0] in self.flights:
            self._begin_turn(sample, self.work.observation_tokens * self.speeds.prefill_s)
            self.replicas.schedule(sample[0].replica, self.now)

    def _begin_turn(self, sample: list, prefill_s: float) -> None:
        group = sample[0]
        tokens = sample[2] if sample[3] == 0 else float(self.work.answers.at(self.luck.standard_normal()))
        sample[3] += tokens + self.work.observation_tokens * (sample[3] > 0)
        self.replicas.add(group.replica, self.now, tokens, prefill_s, sample)

    def _scored(self, sample: list) -> None:
        """An episode has ended, and maybe its group."""
        group = sample[0]
        if group not in self.flights:
            return
        length = self.work.prompt_tokens + sample[3]
        group.tokens += length
        group.squares += length * length
        group.left -= 1
        self.trace.episodes += self.counting
        if group.left:
            return
        self.flights.discard(group)
        self.trace.groups += self.counting
        if group.refused:
            self._withdraw(group)
            self._admit()
        else:
            self.finished.setdefault(group.due, deque()).append(group)
        self._try_batch()

    def _place(self) -> None:
        """Lets waiting groups in where there is room, first come, first served."""
        touched = set()
        while self.waiting:
            load, replica = self.least[0]
            if load != self.load[replica]:
                heapq.heappop(self.least)  # a later entry has its load of now
                continue
            size = self.work.group_size
            if load and load + size > self.plan.max_rows:
                break
            group = self.waiting.popleft()
            group.replica = replica
            self.load[replica] += size
            heapq.heapreplace(self.least, (self.load[replica], replica))
            prefill_s = self.work.prompt_tokens * self.speeds.prefill_s
            turns = [1] * size if self.plain else self._turns(size)
            for length, count in zip(group.lengths, turns, strict=True):
                self._begin_turn([group, count, length, 0.0], prefill_s)
                prefill_s = 0.0
            touched.add(replica)
        for replica in touched:
            self.replicas.schedule(replica, self.now)

    def _turns(self, count: int) -> list[int]:
        drawn = self.work.turns.at(self.luck.standard_normal(count))
        return np.maximum(np.rint(drawn), 1).astype(int).tolist()

    def _leave(self, replica: int) -> None:
        self.load[replica] -= 1
        heapq.heappush(self.least, (self.load[replica], replica))

    # Admission: see rollout/admission.py, whose (1) and (2) these are

    def _room(self) -> int:
        plan, per_step, waiting = self.plan, self.work.prompts, sum(self.due.values())
        ahead = (self.version + plan.max_staleness - self.next_step + 1) * per_step
        if plan.extra_groups is not None and ahead > 0:
            if plan.max_staleness == 0:
                return max(per_step + plan.extra_groups - waiting, 0)
            ahead = min(ahead, per_step + plan.extra_groups)
        return max(ahead - waiting, 0)

    def _admit(self) -> None:
        due = self.version + self.plan.max_staleness
        for _ in range(self._room()):
            again = bool(self.returned)
            group = self.returned.popleft() if again else self._draw()
            group.begin(self.version, due)
            group.urgent = again
            self.urgent += again
            self.due[due] = self.due.get(due, 0) + 1
            self.flights.add(group)
            self.waiting.append(group)
        self._place()

    def _draw(self) -> Group:
        if not self.drawn:
            work = self.work
            lengths = draw_groups(work.answers, work.prompts, work.group_size, self.luck, work.shared)
            if work.longest:
                lengths.flat[np.argmax(lengths)] = work.longest
            refused = self.luck.random(work.prompts) < work.refused
            self.drawn.extend(Group(*each) for each in zip(lengths.tolist(), refused.tolist(), strict=True))
        return self.drawn.popleft()

    def _withdraw(self, group: Group) -> None:
        self.urgent -= group.urgent
        self.due[group.due] -= 1
        if not self.due[group.due]:
            del self.due[group.due]

    def _try_batch(self) -> None:
        per_step = self.work.prompts
        if not self.collecting or sum(map(len, self.finished.values())) < per_step:
            return
        if self.urgent > sum(group.urgent for groups in self.finished.values() for group in groups):
            return
        if self.plan.max_staleness > 0:
            going, waiting = per_step, 0
            for due in sorted(self.due):
                gone = min(going, len(self.finished.get(due, ())))
                going, waiting = going - gone, waiting + self.due[due] - gone
                if waiting > (due - self.next_step) * per_step:
                    return
        self._take()

    def _take(self) -> None:
        """Hands a batch to the trainer: those due first, and those given up before above all."""
        batch: list[Group] = []
        for due in sorted(self.finished):
            groups = self.finished[due]
            if self.urgent:
                groups = self.finished[due] = deque(sorted(groups, key=lambda group: not group.urgent))
            while groups and len(batch) < self.work.prompts:
                batch.append(groups.popleft())
        for group in batch:
            self._withdraw(group)
        self.trace.staleness += self.counting * sum(self.next_step - group.admitted for group in batch) / len(batch)
        self.collecting = False
        self.next_step += 1
        self._stage("rollout", self.now - self.since)
        if self.plan.max_staleness == 0:
            self._sampled(self.since, self.now)
            self._give_up_the_rest()
        else:
            self._admit()
        self._train(batch)

    def _give_up_the_rest(self) -> None:
        rest = [*self.flights, *(group for groups in self.finished.values() for group in groups)]
        self.flights.clear()
        self.finished.clear()
        self.waiting.clear()
        self.replicas.clear(self.now)
        for group in rest:
            self._withdraw(group)
            # Events of the group given up may still come; they find it no longer in flight.
            self.returned.append(Group(group.lengths, group.refused))
        if rest:
            self.load = [0] * self.plan.replicas
            self.least = [(0, replica) for replica in range(self.plan.replicas)]

    # Training

    def _train(self, batch: list[Group]) -> None:
        tokens, squares = sum(group.tokens for group in batch), sum(group.squares for group in batch)
        self.trace.trained += tokens * self.counting
        spans = {stage.name: stage.fixed_s + stage.token_s * tokens + stage.square_s * squares
                 for stage in self.speeds.stages}  # fmt: skip
        if self.plan.colocated and self.speeds.switch_s:
            spans["switch"] = self.speeds.switch_s
        at = self.now
        for name, seconds in spans.items():
            self._stage(name, seconds, at)
            at += seconds
        if self.plan.colocated:
            self.replicas.pause(self.now, at - self.now)
        self._at(at, TRAINER, 1)

    def _trainer(self, trained: int) -> None:
        """The trainer has finished training (1), or new weights have arrived (0)."""
        if trained:
            if self.plan.max_staleness > 0 and not self.plan.colocated:
                self._sampled(self.since, self.now)
            self._end_step()
            self.replicas.pause(self.now, self.speeds.sync_s)
            self._synchronize()
            return
        self._stage("sync", self.speeds.sync_s, None)
        self.version = self.next_step
        self.collecting, self.since = True, self.now
        self._admit()
        if 2 * self.replicas.busy >= self.plan.replicas:
            self.tail_from = None
        self._try_batch()

    def _synchronize(self) -> None:
        for devices in ("policy", "rollout"):
            self._segment("sync", self.speeds.sync_s, devices=devices)
        self._at(self.now + self.speeds.sync_s, TRAINER, 0)

    def _sampled(self, start: float, end: float) -> None:
        """Notes what the replicas did, and from when on less than half of them had anything to do."""
        tail = end if self.tail_from is None else min(max(self.tail_from, start), end)
        self._segment("rollout", tail - start, start, "rollout")
        self._segment("tail", end - tail, tail, "rollout")

    def _end_step(self) -> None:
        trace = self.trace
        if not self.counting:
            if self.next_step == self.plan.warmup:
                # What was sampled before does not count: clocks are brought to now, and counts begin anew.
                for replica in range(self.plan.replicas):
                    self.replicas.progress(replica, self.now)
                self.replicas.decoding_s = self.replicas.sampled = self.replicas.row_s = 0.0
                self.trace, self.began, self.counting = Trace(), self.now, True
            return
        trace.ends.append(self.now - self.began)
        if len(trace.ends) == self.plan.steps:
            for replica in range(self.plan.replicas):
                self.replicas.progress(replica, self.now)
            trace.decoding_s, trace.sampled = self.replicas.decoding_s, self.replicas.sampled
            trace.rows = self.replicas.row_s / trace.decoding_s if trace.decoding_s else 0.0
            trace.staleness /= self.plan.steps

    def _stage(self, name: str, seconds: float, at: float | None = 0.0) -> None:
        """Counts a stage; `at` None: its segment is there already."""
        if self.counting:
            self.trace.seconds[name] = self.trace.seconds.get(name, 0.0) + seconds
        if name == "rollout":
            self._segment(name, seconds, self.since)
        elif at is not None:
            self._segment(name, seconds, at)

    def _segment(self, name: str, seconds: float, at: float | None = None, devices: str = "policy") -> None:
        start = (self.now if at is None else at) - self.began
        if self.counting and seconds > 0 and len(self.trace.ends) == self.plan.steps - 1:
            self.trace.segments.append(Segment(devices, name, start, start + seconds))
