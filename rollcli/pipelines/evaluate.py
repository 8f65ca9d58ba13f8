"""Evaluation on held-out problems: accuracy with an interval, unbiased pass@k, lengths, every sample kept.

`evaluate_policy` measures the weights that the replicas of a running pipeline hold; `evaluate` is `roll eval`, which
starts replicas for a checkpoint or any model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollcli.cluster.autopsy import Autopsy
from rollcli.cluster.session import ray_session
from rollcli.cluster.supervisor import Supervisor
from rollcli.config.dump import to_values
from rollcli.config.load import LoadedRecipe, load_recipe
from rollcli.config.schema import RlRecipe, TaskConfig
from rollcli.data.carriers import Group, Task
from rollcli.data.stream import TaskSequence
from rollcli.engines.base import SamplingParams
from rollcli.errors import ConfigError, RunNotFound
from rollcli.pipelines import preflight
from rollcli.pipelines.roles import Roles
from rollcli.pipelines.samples import write_rollouts
from rollcli.rollout.groups import GroupRunner
from rollcli.rollout.router import Router
from rollcli.rollout.scheduler import task_sampling
from rollcli.runs.directory import RunDirectory, runs_root
from rollcli.runs.listing import find_run
from rollcli.runs.status import write_json

NORMAL_95 = 1.959964


@dataclass
class Evaluation:
    """Results by task, their mean accuracy, and the groups they come from."""

    tasks: dict[str, dict[str, float]]
    groups: list[Group]

    @property
    def accuracy(self) -> float:
        """Mean accuracy over tasks."""
        return float(np.mean([facts["accuracy"] for facts in self.tasks.values()])) if self.tasks else float("nan")

    def write(self, path: Path, step: int) -> Path:
        """Writes `path.json` with the figures and `path.parquet` with the samples; returns the latter."""
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = path.with_name(path.name + ".parquet")
        write_rollouts(samples, step, self.groups)
        write_json(path.with_name(path.name + ".json"), {"step": step, "accuracy": self.accuracy, "tasks": self.tasks})
        return samples


def held_out(recipe: RlRecipe) -> list[tuple[Task, list[SamplingParams]]]:
    """Returns the held-out problems of every task, always the same ones, and how each is answered."""
    orders: list[tuple[Task, list[SamplingParams]]] = []
    for config in recipe.tasks:
        own, common = config.evaluation, recipe.evaluation
        wanted = common.problems_per_task if own.count is None else own.count
        if not wanted:
            continue
        sequence = TaskSequence(config, "test", recipe.seed)
        size = sequence.items.size
        ways = [evaluation_sampling(config, recipe)] * (own.samples or common.samples)
        orders += [(sequence[index], ways) for index in range(wanted if size is None else min(wanted, size))]
    return orders


def evaluation_sampling(config: TaskConfig, recipe: RlRecipe) -> SamplingParams:
    """Returns how a task is sampled when it is evaluated: by its own word, the evaluation's, or the rollout's."""
    sampling = task_sampling(config, SamplingParams(**vars(recipe.rollout.sampling)))
    for block in (recipe.evaluation, config.evaluation):
        own = {name: getattr(block, name) for name in ("temperature", "top_p", "max_tokens")}
        sampling = dataclasses.replace(sampling, **{name: value for name, value in own.items() if value is not None})
    return sampling


async def evaluate_policy(runner: GroupRunner, recipe: RlRecipe) -> Evaluation:
    """Evaluates whatever weights the rollout replicas hold, by the `evaluation` blocks of the recipe and its tasks."""
    # Problems are generated and read off the event loop, which has a heartbeat to keep.
    groups = await runner.run_all(await asyncio.to_thread(held_out, recipe))
    by_task: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.task.name].append(group)
    return Evaluation({name: summarize(members) for name, members in by_task.items()}, groups)


def summarize(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the figures of one task. A failed episode counts as wrong: what did not answer did not answer right."""
    # An episode of several trajectories, of players for example, has their mean.
    scores = [
        [float(np.mean([t.accuracy if t.usable else 0.0 for t in episode])) for episode in group.by_episode()]
        for group in groups
    ]
    answered = [trajectory for group in groups for trajectory in group.usable]
    accuracy = float(np.mean([np.mean(row) for row in scores]))
    low, high = wilson(accuracy, len(scores))
    samples = min(len(row) for row in scores)
    return {
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "problems": float(len(groups)),
        "samples": float(samples),
        **{f"pass@{k}": _pass_at(scores, k) for k in _powers_of_two(samples)},
        "length": float(np.mean([t.response_tokens for t in answered])) if answered else 0.0,
        "truncated": float(np.mean([t.stop_reason == "length" for t in answered])) if answered else 0.0,
        "failed": float(sum(group.failed_episodes for group in groups)),
    }


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share of `count` problems (JASA 22, 1927, p. 209).

    Answers to one problem are not independent, so the number of problems counts, not that of answers.
    """
    z2 = NORMAL_95**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    margin = NORMAL_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(center - margin, 0.0), min(center + margin, 1.0)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Returns the unbiased estimate `1 - C(n - c, k) / C(n, k)` (Codex, arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _pass_at(scores: Sequence[Sequence[float]], k: int) -> float:
    return float(np.mean([pass_at_k(len(row), sum(score > 0.5 for score in row), k) for row in scores]))


def _powers_of_two(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


@dataclass
class EvaluationReport:
    """What `roll eval` found.

    Attributes:
        checkpoint: what was evaluated.
        tasks: the figures of `summarize`, by task.
        samples_path: Parquet file of every sample.
    """

    checkpoint: str
    tasks: dict[str, dict[str, float]]
    samples_path: Path


def evaluate(
    checkpoint: str, *, recipe: str | None = None, overrides: Sequence[str] = (), task: str | None = None,
    problems: int | None = None, samples: int | None = None, temperature: float | None = None,
    address: str | None = None,
) -> EvaluationReport:  # fmt: skip
    """Evaluates a checkpoint (`RUN`, `RUN@STEP`, a path) by its run's recipe, or any model by the recipe named.

    Raises:
        RollError: checkpoint, recipe or task is not there, or the evaluation failed.
    """
    run = _run_of(checkpoint)
    if recipe is None and run is None:
        if not re.search(r"[/:]", checkpoint):
            try:
                find_run(checkpoint.partition("@")[0])
            except RunNotFound as error:
                raise RunNotFound(error.message, f"{error.hint}; a model of no run needs `--recipe RECIPE`") from None
        raise ConfigError(
            f"`{checkpoint}` belongs to no run, so it has no recipe to be evaluated by",
            hint="name one, for example `--recipe grpo-math`",
        )
    settings = {"problems_per_task": problems, "samples": samples, "temperature": temperature}
    asked = [f"evaluation.{name}={value}" for name, value in settings.items() if value is not None]
    loaded = load_recipe(recipe or str(run.config), [f"model.path={checkpoint}", *asked, *overrides])
    loaded.name = run.id if recipe is None and run is not None else loaded.name
    if not isinstance(loaded.recipe, RlRecipe):
        raise ConfigError(
            f"recipe `{loaded.name}` has no rewards to evaluate by", hint="name another one with `--recipe RECIPE`"
        )
    for config in loaded.recipe.tasks:  # what is asked for here is asked of every task
        given = {"count": problems, "samples": samples, "temperature": temperature}
        settled = {name: None for name, value in given.items() if value is not None}
        config.evaluation = dataclasses.replace(config.evaluation, **settled)
    if task is not None:
        _keep_task(loaded, task)
    preflight.check(loaded)
    result = asyncio.run(_measure(loaded, address))
    folder = run.evals if run else runs_root() / "evals"
    name = re.sub(r"[^\w.@-]+", "_", checkpoint).strip("_")
    path = folder / f"eval_{name}_{time.strftime('%Y%m%d-%H%M%S')}"
    return EvaluationReport(checkpoint, result.tasks, result.write(path, 0))


def _run_of(checkpoint: str) -> RunDirectory | None:
    """Returns the run that a checkpoint's name or path belongs to."""
    path = Path(checkpoint)
    for folder in (path, *path.parents) if path.is_dir() else ():
        if (folder / "status.json").is_file() and (folder / "config.yaml").is_file():
            return RunDirectory(folder)
    with contextlib.suppress(RunNotFound):
        return find_run(checkpoint.partition("@")[0])
    return None


def _keep_task(loaded: LoadedRecipe, name: str) -> None:
    names = [config.name for config in loaded.recipe.tasks]
    if name not in names:
        raise ConfigError(f"recipe `{loaded.name}` has no task `{name}`", hint=f"it has {', '.join(names)}")
    loaded.recipe.tasks = [config for config in loaded.recipe.tasks if config.name == name]
    asked = {reward.args.get("model") for config in loaded.recipe.tasks for reward in config.rewards}
    loaded.recipe.reward_models = [model for model in loaded.recipe.reward_models if model.name in asked]


def _devices(recipe: RlRecipe, gpus: int) -> dict[str, list[int]]:
    """Returns the devices of all that samples and scores, one role after the other, from the first again at the end."""
    found: dict[str, list[int]] = {}
    wanted = {"rollout": recipe.rollout.replicas * recipe.rollout.parallel.processes}
    wanted |= {model.role: model.replicas * model.parallel.processes for model in recipe.reward_models}
    used = 0
    for role, count in wanted.items() if gpus else ():
        found[role] = [device % gpus for device in range(used, used + count)]
        used += count
    return found


async def _measure(loaded: LoadedRecipe, address: str | None) -> Evaluation:
    """Starts the workers that sampling and scoring need, and no trainer."""
    recipe: RlRecipe = loaded.recipe
    folder = str(loaded.folder.resolve()) if loaded.folder else None
    import ray

    with ray_session(address, f"eval-{time.time_ns()}"), contextlib.ExitStack() as stack:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        roles = Roles(recipe, to_values(recipe, loaded.folder), folder, None, _devices(recipe, gpus), train=False)
        stack.callback(roles.release)
        await roles.ready()
        supervisor = Supervisor(Autopsy(None), recipe.rollout.max_restarts_per_hour, lambda _: None, math.inf)
        roles.supervise(supervisor)
        router = Router(len(roles.rollout), recipe.rollout.max_rows)
        runner = GroupRunner(roles.environments, router, supervisor, lambda *_: None)
        return await evaluate_policy(runner, recipe)
