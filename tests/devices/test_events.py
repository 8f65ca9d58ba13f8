"""The simulation of events against closed forms, and against a slow reference that counts every token."""

from __future__ import annotations

import numpy as np
import pytest

from rollcli.devices.events import Run
from rollcli.devices.lengths import Fixed, draw_groups, measured
from rollcli.devices.workload import Schedule, Speeds, Stage, Work
from rollcli.rollout.admission import Admission

STEP = tuple(0.1 + 0.01 * rows for rows in range(65))


def run(work, schedule, *, step=STEP, train=0.0, **speeds):
    stages = (Stage("update", train),) if train else ()
    return Run(work, Speeds(step, stages=stages, **speeds), schedule).run()


def test_a_synchronous_step_is_sync_rollout_and_training():
    trace = run(Work(4, 4, 0, Fixed(50)), Schedule(1, 16, steps=3), train=7.0, sync_s=2.0)
    rollout = 50 * (0.1 + 0.16)
    assert trace.seconds == pytest.approx({"sync": 6, "rollout": 3 * rollout, "update": 21})
    assert trace.ends == pytest.approx([(9 + rollout) * step for step in (1, 2, 3)])
    assert (trace.episodes, trace.groups, trace.sampled) == (48, 12, pytest.approx(48 * 50))
    assert trace.staleness == 0


def test_replicas_share_the_groups_and_rows_are_bounded():
    half = run(Work(4, 4, 0, Fixed(50)), Schedule(2, 16, steps=1)).ends[0]
    assert half == pytest.approx(50 * (0.1 + 0.08))
    waves = run(Work(4, 4, 0, Fixed(50)), Schedule(1, 8, steps=1)).ends[0]
    assert waves == pytest.approx(2 * 50 * (0.1 + 0.08))


def test_a_prompt_is_computed_once_for_its_group():
    trace = run(Work(2, 8, 100, Fixed(10)), Schedule(1, 16, steps=1), prefill_s=0.05)
    assert trace.ends[0] == pytest.approx(2 * 100 * 0.05 + 10 * 0.26)
    assert trace.trained == 16 * 110


def test_training_grows_with_tokens_and_their_squares():
    work, stage = Work(2, 2, 3, Fixed(7)), Stage("update", 1.0, 0.5, 0.01)
    trace = Run(work, Speeds(STEP, stages=(stage,)), Schedule(1, 4, steps=1)).run()
    assert trace.seconds["update"] == pytest.approx(1 + 0.5 * 40 + 0.01 * 4 * 100)


def test_turns_environment_observation_and_reward_follow_one_another():
    work = Work(1, 1, 0, Fixed(10), turns=Fixed(3), observation_tokens=20, environment_s=Fixed(5), reward_s=Fixed(4))
    trace = run(work, Schedule(1, 4, steps=1), prefill_s=0.1)
    assert trace.ends[0] == pytest.approx(3 * 10 * 0.11 + 2 * (5 + 20 * 0.1) + 4)
    assert (trace.requests, trace.episodes, trace.trained) == (3, 1, 30 + 40)


@pytest.mark.parametrize(("train", "limit"), [(5.0, 50 * 0.26), (40.0, 40.0)])
def test_an_asynchronous_step_is_the_longer_of_rollout_and_training(train, limit):
    schedule = Schedule(1, 16, max_staleness=1, warmup=3, steps=4)
    trace = run(Work(4, 4, 0, Fixed(50)), schedule, train=train, sync_s=1.0)
    assert trace.ends[-1] / 4 == pytest.approx(limit + 1)  # both stand while new weights arrive
    assert trace.staleness == pytest.approx(1)


def test_colocated_sampling_stands_while_training_runs():
    work, plan = Work(4, 4, 0, Fixed(50)), {"max_staleness": 1, "warmup": 3, "steps": 4}
    split = run(work, Schedule(1, 16, **plan), train=5.0).ends[-1] / 4
    shared = run(work, Schedule(1, 16, colocated=True, **plan), train=5.0, switch_s=2.0).ends[-1] / 4
    assert (split, shared) == (pytest.approx(13), pytest.approx(13 + 5 + 2))


def test_a_long_tail_holds_up_synchronous_steps_only():
    work = Work(16, 2, 0, measured([20] * 19 + [400]), shared=0.0)
    flat = (0.0, *[0.1] * 64)
    one = run(work, Schedule(4, 64, steps=4), step=flat)
    assert one.ends[-1] / 4 == pytest.approx(400 * 0.1)
    many = run(work, Schedule(4, 64, max_staleness=4, warmup=6, steps=10), step=flat).ends[-1] / 10
    assert 400 * 0.1 / 5 * 0.9 < many < 400 * 0.1 / 3


def test_refused_groups_are_replaced():
    trace = run(Work(32, 2, 0, Fixed(10), refused=0.5), Schedule(4, 64, steps=8))
    assert trace.groups / (8 * 32) == pytest.approx(2, rel=0.15)
    assert trace.trained == 8 * 32 * 2 * 10


def test_groups_beyond_the_need_end_a_step_sooner_and_come_again():
    work, flat = Work(2, 1, 0, measured([10, 100]), shared=0.0), (0.0, *[0.1] * 64)
    # Stratified, every two draws are a short and a long answer.
    assert run(work, Schedule(4, 64, steps=1), step=flat).ends[0] == pytest.approx(10)
    extra = run(work, Schedule(4, 64, extra_groups=2, steps=2), step=flat)
    assert extra.ends == pytest.approx([1, 11])  # two short ones; then the two long ones, which were given up


def test_what_is_drawn_depends_on_the_seed_alone():
    work = Work(8, 4, 5, measured(range(1, 60)))
    first, again, other = (run(work, Schedule(2, 16, seed=seed)).ends for seed in (1, 1, 2))
    assert first == again != other


def reference(work, speeds, plan, steps):
    """The same, token by token: a replica's step is one event, new rows join at the next one; the real admission."""
    luck, admission = np.random.default_rng(plan.seed), Admission(work.prompts, plan.max_staleness, None, 10**9)
    now, pause, ends, number = 0.0, 0.0, [], 0
    rows = [[] for _ in range(plan.replicas)]  # [tokens left, group]
    ticks, fresh = [None] * plan.replicas, [[] for _ in range(plan.replicas)]
    queue, drawn, left, finished = [], [], {}, {}
    trainer, until = "sync", speeds.sync_s
    pause = until

    def admit():
        nonlocal number
        for _ in range(admission.room()):
            if not drawn:
                drawn.extend(draw_groups(work.answers, work.prompts, work.group_size, luck, work.shared).tolist())
                luck.random(work.prompts)
            admission.admit(number)
            left[number] = work.group_size
            queue.append((number, drawn.pop(0)))
            number += 1
        place()

    def load(replica):
        return len(rows[replica]) + len(fresh[replica])

    def place():
        while queue:
            replica = min(range(plan.replicas), key=load)
            if load(replica) and load(replica) + work.group_size > plan.max_rows:
                return
            group, lengths = queue.pop(0)
            fresh[replica] += [[length, group] for length in lengths]
            if ticks[replica] is None:
                begin(replica)

    def begin(replica):
        rows[replica] += fresh[replica]
        fresh[replica] = []
        ticks[replica] = max(now, pause) + speeds.step_s[len(rows[replica])] if rows[replica] else None

    while len(ends) < steps:
        times = [(tick, replica) for replica, tick in enumerate(ticks) if tick is not None]
        tick, replica = min(times, default=(float("inf"), -1))
        if trainer != "collect" and until <= tick:
            now = until
            if trainer == "train":
                ends.append(now)
                trainer, until, pause = "sync", now + speeds.sync_s, now + speeds.sync_s
                ticks = [None if tick is None else tick + speeds.sync_s for tick in ticks]
                continue
            trainer, admission.version = "collect", admission.next_step
            admit()
        else:
            now = tick
            for row in rows[replica]:
                row[0] -= 1
            for row in [row for row in rows[replica] if row[0] <= 0]:
                rows[replica].remove(row)
                left[row[1]] -= 1
                if not left[row[1]]:
                    finished[row[1]] = True
            begin(replica)
            place()
        if trainer == "collect" and (batch := admission.batch(finished)) is not None:
            for group in batch:
                del finished[group]
            admission.take(batch)
            trainer, until = "train", now + speeds.stages[0].fixed_s
            if plan.max_staleness:
                admit()
    return ends


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("train", [2.0, 30.0])
def test_the_slow_reference_agrees(staleness, train):
    lengths = np.random.default_rng(5).lognormal(4, 0.8, 50).round().clip(5, 400)
    work, plan = Work(8, 4, 0, measured(lengths)), Schedule(3, 12, max_staleness=staleness, steps=8, seed=3)
    speeds = Speeds(tuple(0.02 + 0.004 * rows for rows in range(13)), stages=(Stage("update", train),), sync_s=1.5)
    ends, slow = Run(work, speeds, plan).run().ends, reference(work, speeds, plan, 8)
    assert ends[-1] == pytest.approx(slow[-1], rel=0.02)
    assert np.diff(ends) == pytest.approx(np.diff(slow), rel=0.1)


@pytest.mark.parametrize("seed", range(40))
def test_any_schedule_ends_with_full_batches(seed):
    """Nothing is lost, and nothing is older than allowed, whatever is combined."""
    luck = np.random.default_rng(seed)
    staleness, prompts, group = int(luck.choice([0, 0, 1, 2, 5])), int(luck.integers(1, 9)), int(luck.integers(1, 5))
    work = Work(
        prompts, group, float(luck.integers(0, 50)), measured(luck.integers(1, 80, 9)),
        turns=Fixed(int(luck.integers(1, 4))), observation_tokens=float(luck.integers(0, 9)),
        environment_s=Fixed(float(luck.choice([0, 2]))), reward_s=Fixed(float(luck.choice([0, 3]))),
        refused=float(luck.choice([0, 0.4])),
    )  # fmt: skip
    schedule = Schedule(
        int(luck.integers(1, 5)), int(luck.integers(1, 12)), colocated=bool(luck.integers(2)), max_staleness=staleness,
        extra_groups=[None, 0, int(luck.integers(0, max(staleness, 1) * prompts + 1))][luck.integers(3)],
        warmup=int(luck.integers(3)), steps=4, seed=seed,
    )  # fmt: skip
    trace = run(work, schedule, train=float(luck.choice([0.5, 20])), sync_s=0.5, prefill_s=0.01, switch_s=1.0)
    assert len(trace.ends) == 4 and np.diff([0, *trace.ends]).min() > 0
    assert trace.trained >= 4 * prompts * group * (work.prompt_tokens + 1)
    assert sum(trace.seconds.values()) == pytest.approx(trace.ends[-1])
    assert 0 <= trace.staleness <= staleness
    assert trace.decoding_s <= trace.ends[-1] * schedule.replicas * (1 + 1e-9)
