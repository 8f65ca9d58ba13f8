"""What one sample costs the controller with 64, 512 and 4,096 episodes under way. Run by hand.

    python tests/benchmarks/controller.py [--quick] [--profile FILE]

Everything is real — Ray, environment worker, reward worker, replica, scheduler — but the engine: a step of it sleeps,
and an answer is the same tokens after a drawn number of steps, so that no model takes the cores from what is measured.
Each size samples as much as the others, after a wave that warms up and does not count. The aim: a sample's cost does
not grow by more than half from 64 episodes to 4,096.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollcli.engines.base import Completion, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from rollcli.config.schema import RlRecipe
    from rollcli.pipelines.roles import Roles

SIZES, GROUP, TOKENS = (64, 512, 4096), 16, 64
STEP_S, MEDIAN_STEPS, SPREAD, LONGEST_STEPS = 0.002, 25, 0.3, 500
RECIPE = Path(__file__).parents[2] / "recipes" / "grpo-math.yaml"
AIM = 1.5


class Engine:
    """Answers `TOKENS` tokens after a drawn number of steps, heavy-tailed; a step costs the same for any number."""

    def __init__(self, model: Any, max_rows: int) -> None:
        self.max_context, self.version, self.steps = 128, 0, 0
        self.running: dict[str, GenerateRequest] = {}
        self.due: dict[int, list[str]] = defaultdict(list)
        self.ended: list[Completion] = []

    @property
    def pending(self) -> int:
        return len(self.running) + len(self.ended)

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            drawn = MEDIAN_STEPS * random.Random(request.seed).lognormvariate(0, SPREAD)
            self.due[self.steps + 1 + min(int(drawn), LONGEST_STEPS)].append(request.id)
            self.running[request.id] = request

    def abort(self, ids: Iterable[str]) -> None:
        self.ended += [self._end(id, "abort") for id in ids if id in self.running]

    def step(self) -> list[Completion]:
        time.sleep(STEP_S)
        self.steps += 1
        done = [self._end(id, "stop") for id in self.due.pop(self.steps, []) if id in self.running]
        done, self.ended = done + self.ended, []
        return done

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        self.version = version

    def stats(self) -> dict[str, float]:
        return {"model_s": 0.0}

    def _end(self, id: str, reason: str) -> Completion:
        count = min(TOKENS, self.running.pop(id).sampling.max_tokens)
        tokens = np.arange(count, dtype=np.int32) % 10 + 10
        return Completion(id, tokens, np.full(count, -0.5, np.float32), np.full(count, self.version, np.int32), reason)


@dataclass(frozen=True)
class Cost:
    """Episodes under way on the mean, wall-clock seconds, and CPU seconds by process, of a number of samples."""

    samples: int
    under_way: float
    wall_s: float
    cpu_s: dict[str, float]

    def per_sample_us(self, role: str) -> float:
        return self.cpu_s[role] / self.samples * 1e6


class Bench:
    """The workers of a recipe, and batches of any size from them."""

    def __init__(self, recipe: RlRecipe, roles: Roles) -> None:
        from rollcli.cluster.autopsy import Autopsy
        from rollcli.cluster.supervisor import Supervisor

        self.recipe, self.roles = recipe, roles
        self.seen: list[int] = []
        self.supervisor = Supervisor(Autopsy(None), 0, print, 60.0)
        roles.supervise(self.supervisor)

    async def start(self) -> None:
        """Waits for the workers, and learns their processes."""
        await self.roles.ready()
        self.supervisor.watch()
        self.pids = {"driver": [os.getpid()]}
        for cluster in self.roles.all:
            self.pids[cluster.role] = [fact["pid"] for fact in await cluster.all("ready")]

    async def waves(self, episodes: int, number: int) -> None:
        """Collects batches of `episodes`, with one batch ahead and room for `episodes` at once."""
        from rollcli.data.stream import TaskStream
        from rollcli.rollout.admission import Admission
        from rollcli.rollout.groups import GroupRunner
        from rollcli.rollout.router import Router
        from rollcli.rollout.scheduler import Rules, Scheduler

        runner = GroupRunner(self.roles.environments, Router(1, episodes), self.supervisor, self.see, 60.0)
        admission = Admission(episodes // GROUP, 1, None, number)
        rules = Rules(GROUP, max_group_attempts=1, max_failure_share=0.0, keep_group=lambda _: True)
        scheduler = Scheduler(runner, TaskStream(self.recipe.tasks, self.recipe.seed), admission, rules)
        for step in range(number):
            scheduler.serve(step)
            groups = await scheduler.collect(SamplingParams(TOKENS))
            assert all(len(group.usable) == GROUP for group in groups)

    def see(self, done: int, admitted: int, states: dict[str, int], longest: int) -> None:
        """Remembers how many episodes are under way when one ends."""
        self.seen.append(sum(count for state, count in states.items() if state not in ("done", "failed")))

    async def measure(self, episodes: int, samples: int) -> Cost:
        """Returns what `samples` cost with `episodes` under way."""
        await self.waves(episodes, 1)
        self.seen.clear()
        before, began = self.cpu_s(), time.perf_counter()
        await self.waves(episodes, samples // episodes)
        wall_s, after = time.perf_counter() - began, self.cpu_s()
        return Cost(
            samples, sum(self.seen) / len(self.seen), wall_s, {role: after[role] - before[role] for role in before}
        )

    def cpu_s(self) -> dict[str, float]:
        """Returns CPU seconds so far, user and system, by role."""
        return {role: sum(map(process_cpu_s, pids)) for role, pids in self.pids.items()}


def process_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of one process, its ended threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures every size and prints costs beside those of the smallest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fourth of the samples: a minute")
    parser.add_argument("--profile", type=Path, help="write a profile of the driver at the largest size to this file")
    arguments = parser.parse_args()

    from rollcli.cluster.session import ray_session
    from rollcli.config.dump import to_values
    from rollcli.config.load import load_recipe
    from rollcli.pipelines.roles import Roles

    engine = f"rollout.engine={Path(__file__).resolve()}:Engine"
    loaded = load_recipe(str(RECIPE), [engine, f"rollout.sampling.max_tokens={TOKENS}"])
    values = to_values(loaded.recipe, loaded.folder)
    samples = max(SIZES) * (1 if arguments.quick else 4)
    print(f"{samples:,} samples a size, groups of {GROUP}, answers of {TOKENS} tokens; load {os.getloadavg()[0]:.1f}")
    print(
        f"{'episodes':>8} {'samples/s':>10} {'driver':>16} {'environment':>16} {'rollout':>16} {'reward':>16}  µs CPU"
    )

    async def run() -> None:
        with ray_session(None, "controller"):
            roles = Roles(loaded.recipe, values, str(loaded.folder), None, {}, train=False)
            bench = Bench(loaded.recipe, roles)
            await bench.start()
            first: Cost | None = None
            for episodes in SIZES:
                profile = cProfile.Profile() if arguments.profile and episodes == max(SIZES) else None
                if profile:
                    profile.enable()
                cost = await bench.measure(episodes, samples)
                if profile:
                    profile.disable()
                    profile.dump_stats(arguments.profile)
                first = first or cost
                report(episodes, cost, first)
            await bench.supervisor.close()
            roles.release()

    asyncio.run(run())


def report(episodes: int, cost: Cost, first: Cost) -> None:
    """Prints one line: microseconds of CPU per sample by process, and their ratio to the smallest size."""
    cells = []
    for role in ("driver", "environment", "rollout", "reward"):
        ratio = cost.per_sample_us(role) / max(first.per_sample_us(role), 1e-9)
        cells.append(f"{cost.per_sample_us(role):>8,.0f} {ratio:.2f}×{'!' if ratio > AIM else ' '}".rjust(16))
    print(f"{episodes:>8,} {cost.under_way:>6,.0f} {cost.samples / cost.wall_s:>10,.0f} {' '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
