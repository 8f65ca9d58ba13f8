"""What the order of work gains: asynchronous training, scheduling by sample, early abort. A simulation, run by hand.

    python tests/benchmarks/scheduling.py [--quick]

The scheduler, admission, group runner and router are the real ones; replicas, environments, rewards and the trainer
are models of them in virtual time: the loop's clock jumps to the next timer, so a run of hours takes seconds.

    replica      b rows: a token takes `BASE_S + ROW_S * b`, as of an 8B model on one 80 GB device; `MAX_ROWS` at once
    answer       lognormal, half its log-variance the problem's; the longest of 4,096 is about 20 times the median
    turn         lognormal tokens, then the environment's time: gaussian, or lognormal with a heavy tail; 12 ± 7 turns
    reward       lognormal seconds, one at a time on each of four processes per device
    problem      its pass rate is drawn from Beta(0.4, 0.4): of groups of 16 about a third are all right or all wrong
    training     a third of the synchronous step, on all D devices; with d of them it takes D / d times as long
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from dataclasses import dataclass, replace

import numpy as np
from simulation import GROUP, LONGEST, Setting, Stream, VirtualLoop, World

from rollcli.cluster.autopsy import Autopsy
from rollcli.cluster.supervisor import Supervisor
from rollcli.data.carriers import Group
from rollcli.engines.base import SamplingParams
from rollcli.rollout.admission import Admission
from rollcli.rollout.groups import GroupRunner
from rollcli.rollout.router import Router
from rollcli.rollout.scheduler import Rules, Scheduler

SYNC_S = 4.0
STALENESS, SHARES = (1, 2, 4), (1 / 8, 1 / 4, 3 / 8, 1 / 2)
RLVR, AGENTIC = "ROLL Flash 2.24×, verl 2.35–2.67×, AReaL 2.77×", "ROLL Flash 2.72×"
DIFFERENCES = """
What differs from the papers: times of replicas, rewards and environments are models, not measured; no prefill, and no
limit of KV memory but `MAX_ROWS`; a group stays on one replica; the bound on staleness holds for every first token.
The published figures are the best of several settings, each against its authors' own synchronous baseline."""


@dataclass
class Measured:
    """What a run took, in virtual seconds; of the steps between warm-up and end.

    Attributes:
        steps: seconds of each step.
        ages: versions between each sample's first token and its training.
        tokens: tokens sampled for each sample trained.
    """

    steps: np.ndarray
    ages: np.ndarray
    tokens: float

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return float(self.steps.mean())


def simulate(setting: Setting) -> Measured:
    """Runs a setting to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_simulate(setting))


async def _simulate(setting: Setting) -> Measured:
    loop, world = asyncio.get_running_loop(), World(setting)
    router = Router(setting.replicas, setting.capacity if setting.by_sample else None)
    runner = GroupRunner(world, router, Supervisor(Autopsy(None), 0, print, 60.0), lambda *_: None)
    admission = Admission(setting.prompts, setting.staleness, setting.extra, setting.steps)
    rules = Rules(GROUP, 20, 0.5, mixed if setting.dynamic else lambda _: True)
    scheduler = Scheduler(runner, Stream(), admission, rules)
    ends, ages = [], []
    for step in range(setting.steps):
        for replica in world.replicas:
            replica.pause()
        await asyncio.sleep(SYNC_S)
        for replica in world.replicas:
            replica.resume(step)
        scheduler.serve(step)
        groups = await scheduler.collect(SamplingParams(LONGEST))
        ages.append([step - int(member.versions[0]) for group in groups for member in group.trajectories])
        await asyncio.sleep(setting.train_s)
        ends.append(loop.time())
    # The first steps fill the pipeline, and the last ones drain it.
    counted = slice(setting.staleness, setting.steps - 1 - setting.staleness)
    sampled = sum(replica.sampled for replica in world.replicas) / (setting.steps * setting.prompts * GROUP)
    return Measured(np.diff(ends)[counted], np.array(ages[1:][counted]), sampled)


def mixed(group: Group) -> bool:
    """As dynamic sampling judges: some right, some wrong."""
    return len({member.accuracy for member in group.usable}) > 1


def gaussian(luck: random.Random) -> tuple[float, float]:
    """A turn of 150 tokens, and an environment that takes 10 ± 5 s."""
    return 150 * luck.lognormvariate(0, 0.7), max(luck.gauss(10, 5), 0.1)


def heavy(luck: random.Random) -> tuple[float, float]:
    """A turn of 150 tokens, and an environment that takes 5 s, sometimes minutes."""
    return 150 * luck.lognormvariate(0, 0.7), min(luck.lognormvariate(math.log(5), 1.2), 300)


def asynchronous(label: str, setting: Setting, published: str) -> None:
    """Prints the step time for each staleness, with the best split of the devices, beside the synchronous ones."""
    sampling_s = simulate(setting).step_s
    train_s = sampling_s / 2
    sync_s = sampling_s + train_s
    batch_s = simulate(replace(setting, by_sample=False)).step_s + train_s
    print(f"\n{label}, {setting.prompts} problems a step, {setting.devices} devices (published: {published})")
    print(f"{'':25} {'step':>8} {'× by sample':>12} {'× by batch':>11}")

    def line(name: str, step_s: float, note: str = "") -> None:
        print(f"  {name:<23} {step_s:6.0f} s {sync_s / step_s:11.2f}× {batch_s / step_s:10.2f}×  {note}", flush=True)

    line("synchronous, by batch", batch_s)
    line("synchronous, by sample", sync_s, f"of which training {train_s:.0f} s")
    for staleness in STALENESS:
        runs = {}
        for share in SHARES:
            split = {"staleness": staleness, "rollout_share": share, "train_s": train_s / (1 - share)}
            run = replace(setting, steps=setting.steps + 2 * staleness, **split)
            runs[run.replicas] = simulate(run)
        replicas, best = min(runs.items(), key=lambda run: run[1].step_s)
        note = f"{replicas} devices sample; staleness {best.ages.mean():.1f}, at most {best.ages.max()}"
        line(f"max_staleness {staleness}", best.step_s, note)


def early_abort(setting: Setting) -> None:
    """Prints sampling time and tokens of a synchronous step with dynamic sampling, and whether they change."""
    settings = {"every group kept, by sample": setting}
    setting = replace(setting, dynamic=True)
    settings |= {"dynamic, by batch": replace(setting, by_sample=False), "dynamic, by sample": setting}
    for extra in (setting.prompts // 4, setting.prompts // 2, setting.prompts):
        settings[f"  {extra} extra groups"] = replace(setting, extra=extra)
    by_batch_s = simulate(settings["dynamic, by batch"]).step_s
    print(f"\nsampling alone, {setting.prompts} problems a step, {setting.devices} devices")
    print(f"{'':30} {'step':>8} {'× by batch':>11} {'tokens/sample':>14} {'first third':>12} {'last third':>11}")
    for name, each in settings.items():
        run = simulate(each)
        third = len(run.steps) // 3
        print(
            f"  {name:<28} {run.step_s:6.0f} s {by_batch_s / run.step_s:10.2f}× {run.tokens:14,.0f} "
            f"{run.steps[:third].mean():10.0f} s {run.steps[-third:].mean():9.0f} s",
            flush=True,
        )


def main() -> None:
    """Prints the three comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small settings only: less than a minute")
    quick = parser.parse_args().quick
    began = time.perf_counter()
    if quick:
        small, large = Setting(prompts=8, devices=8, steps=5), []
    else:
        small, large = Setting(), [Setting(256, devices=64, steps=8), Setting(256, devices=16, steps=8)]
    for setting in (small, *large):
        asynchronous("RLVR", setting, RLVR)
    for label, turn in {"gaussian": gaussian, "heavy-tailed": heavy}.items():
        asynchronous(f"agentic with {label} environments", replace(small, turn=turn), AGENTIC)
    early_abort(replace(small, steps=6 if quick else 40))
    print(f"{DIFFERENCES}\n\nsimulated in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
