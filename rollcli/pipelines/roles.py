"""Starts the workers a recipe needs, all at once, and introduces them to each other."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from rollcli.cluster.classifier_worker import ClassifierWorker
from rollcli.cluster.cluster import Cluster, worker_specs
from rollcli.cluster.judge_worker import JudgeWorker
from rollcli.cluster.placement import ResourcePool
from rollcli.cluster.reward_worker import RewardWorker
from rollcli.cluster.rollout_worker import RolloutWorker
from rollcli.cluster.supervisor import Supervisor
from rollcli.cluster.train_worker import TrainWorker
from rollcli.cluster.weights import WeightSync, choose_transport
from rollcli.config.schema import PolicyConfig, Recipe, RlRecipe
from rollcli.errors import ConfigError, WorkerDied
from rollcli.rollout.environment_worker import EnvironmentWorker, reward_role

CONCURRENT_CALLS = 1_000_000
"""Ray serves at most 1,000 calls of an asynchronous actor at once unless told otherwise."""


class Roles:
    """The clusters of a run; a role the recipe does not need is None and was never started.

    Args:
        recipe: what to run.
        values: its plain values, which workers rebuild it from.
        folder: folder of the recipe file.
        logs: folder for the workers' log files.
        assignment: devices of each role; empty on CPU.
        train: False starts no policy: evaluation.
        sample: False starts nothing that samples or scores: replay.
    """

    def __init__(
        self, recipe: Recipe, values: Mapping[str, Any], folder: str | None, logs: str | None,
        assignment: Mapping[str, list[int]], train: bool = True, sample: bool = True,
    ) -> None:  # fmt: skip
        self.recipe = recipe
        self.pool = ResourcePool(assignment, _spread(recipe))
        self._model_seconds: dict[str, float] = {}
        self._common = (values, folder, logs)
        sampled = isinstance(recipe, RlRecipe)
        replicas = recipe.rollout.replicas if sampled else 0
        cores = os.cpu_count() or 1
        # Training and sampling take turns, so each may use all cores; one is left for environments and rewards.
        share = max(1, (cores - 1) // max(replicas, 1))
        self.policy = self._start_training("policy", recipe.policy) if train else None
        self.reference = self.critic = self.rollout = self.environments = None
        self.rewards: dict[str, Cluster] = {}
        self.reward_models: dict[str, Cluster] = {}
        self.weights: WeightSync | None = None
        self._turn: str | None = None
        self._swapping = asyncio.Lock()
        self._fit: dict[str, list[Any]] = {}
        if not sampled:
            return
        if sample:
            self.rollout = self._start(RolloutWorker, "rollout", replicas, recipe.rollout.threads or share, True)
            self.environments = self._start(
                EnvironmentWorker, "environment", recipe.rollout.environment_workers, 1, concurrent=True
            )
            pools = {reward_role(task): task.reward_workers or recipe.rollout.reward_workers for task in recipe.tasks}
            self.rewards = {role: self._start(RewardWorker, role, count, 1, True) for role, count in pools.items()}
            for model in recipe.reward_models:
                worker = JudgeWorker if model.kind == "judge" else ClassifierWorker
                threads = max(1, (cores - 1) // model.replicas)
                self.reward_models[model.role] = self._start(worker, model.role, model.replicas, threads, True)
        needs = recipe.algorithm.needs() if train else frozenset()
        if needs & {"reference", "reference_distribution"} and not recipe.is_own_reference:
            self.reference = self._start_training("reference", recipe.reference_workers)
        if "critic" in needs:
            self.critic = self._start_training("critic", recipe.critic)
        if self.policy is not None and self.rollout is not None:
            transport = choose_transport(recipe.rollout.sync, assignment)
            self.weights = WeightSync(self.policy, self.rollout, recipe.rollout.sync, transport)

    def _start_training(self, role: str, config: PolicyConfig) -> Cluster:
        threads = config.threads or max(1, (os.cpu_count() or 1) // config.processes)
        specs = worker_specs(role, config.processes, threads, *self._common)
        return Cluster(TrainWorker, specs, self.pool, config.parallel.processes)

    def _start(self, worker: type, role: str, count: int, threads: int, concurrent: bool = False) -> Cluster:
        options = {"max_concurrency": CONCURRENT_CALLS} if concurrent else {}
        return Cluster(worker, worker_specs(role, count, threads, *self._common), self.pool, **options)

    @property
    def reference_model(self) -> Cluster:
        """The workers that compute the reference's passes."""
        return self.policy if self.reference is None else self.reference

    @property
    def all(self) -> list[Cluster]:
        """Every cluster that was started."""
        every = (self.policy, self.reference, self.critic, self.rollout, self.environments, *self._scorers)
        return [cluster for cluster in every if cluster is not None]

    @property
    def _scorers(self) -> list[Cluster]:
        return [*self.rewards.values(), *self.reward_models.values()]

    async def ready(self) -> None:
        """Waits until every worker has started, its model loaded and its peers known.

        Raises:
            ConfigError: the answer's budget leaves no room for a prompt.
        """
        await asyncio.gather(*map(self._connect, self._trainers), *(cluster.ready() for cluster in self.all))
        if self.rollout is None:
            return
        self._context = min(await self.rollout.all("context"))
        self._allowed = max_prompt_tokens(self.recipe, self._context)
        self._fit = {cluster.role: list(cluster.workers) for cluster in (self.rollout, *self._scorers)}
        for cluster in self.rewards.values() if self.reward_models else ():
            await cluster.all("connect", self._asked())
        await self.environments.all("connect", *self._peers())

    def _peers(self) -> tuple[Any, ...]:
        """What an environment worker is told: of a replica under construction, only its dead predecessor."""
        rewards = {role: self._fit[role] for role in self.rewards}
        return self._fit["rollout"], rewards, self._allowed, self._context

    def _asked(self) -> dict[str, list[Any]]:
        """What a reward worker is told: the workers of reward models, by role."""
        return {role: self._fit[role] for role in self.reward_models}

    def supervise(self, supervisor: Supervisor) -> None:
        """Puts all that produces samples in a supervisor's charge; trainers hold state that nobody can replace."""

        async def introduce(cluster: Cluster, rank: int) -> None:
            self._fit[cluster.role][rank] = cluster.workers[rank]
            # An environment worker that has ended as well: its successor is told by `connect`.
            with contextlib.suppress(WorkerDied):
                await self.environments.all("reconnect", cluster.role, rank, cluster.workers[rank])

        async def replica(rank: int) -> None:
            async with self._swapping:
                if self.weights is not None:  # without a trainer the replicas keep what they start with
                    await self.weights.bring(rank)
                if self._turn == "train" and self._takes_turns:
                    await self.rollout.gather([self.rollout.workers[rank].offload.remote()])
            await introduce(self.rollout, rank)

        async def environment(rank: int) -> None:
            await self.environments.gather([self.environments.workers[rank].connect.remote(*self._peers())])

        async def reward(cluster: Cluster, rank: int) -> None:
            if self.reward_models:
                await cluster.gather([cluster.workers[rank].connect.remote(self._asked())])
            await introduce(cluster, rank)

        async def reward_model(cluster: Cluster, rank: int) -> None:
            self._fit[cluster.role][rank] = cluster.workers[rank]
            for asking in self.rewards.values():
                # One that has ended as well: its successor is told by `connect`.
                with contextlib.suppress(WorkerDied):
                    await asking.all("reconnect", cluster.role, rank, cluster.workers[rank])

        supervisor.add(self.rollout, replica)
        supervisor.add(self.environments, environment)
        for cluster in self.rewards.values():
            supervisor.add(cluster, partial(reward, cluster))
        for cluster in self.reward_models.values():
            supervisor.add(cluster, partial(reward_model, cluster))

    async def sync(self, version: int) -> None:
        """Brings the replicas to the policy's weights, as `version`, and leaves shared devices to them."""
        # A new replica that took these weights in must not be given those that were served before.
        async with self._swapping:
            await self._take_turns("sample", lambda: self.weights.sync(version))

    async def training_turn(self) -> None:
        """Leaves devices that trainers and replicas share to the trainers, until the next sync."""
        await self._take_turns("train")

    async def _take_turns(self, turn: str, between: Callable[[], Awaitable[None]] | None = None) -> None:
        """Gives shared devices to whose turn it is; `between` runs while both have their weights there.

        Roles with devices of their own, and asynchronous runs, in which both work at once, keep what they have. On a
        CPU, which all share, the engines are asked all the same, and have nothing to move.
        """
        shared = self._takes_turns
        if shared and turn == "sample" and self._turn == "train":
            await self.rollout.all("onload")
        if between is not None:
            await between()
        if shared and turn != self._turn:
            if turn == "sample":
                await asyncio.gather(*(cluster.all("offload") for cluster in self._trainers))
            else:
                await self.rollout.all("offload")
                await asyncio.gather(*(cluster.all("onload") for cluster in self._trainers))
        self._turn = turn

    @property
    def _trainers(self) -> list[Cluster]:
        return [cluster for cluster in (self.policy, self.reference, self.critic) if cluster is not None]

    @property
    def _takes_turns(self) -> bool:
        roles = [cluster.role for cluster in self._trainers]
        return (
            self.rollout is not None and self.recipe.rollout.max_staleness == 0 and self.pool.shares("rollout", roles)
        )

    async def _connect(self, cluster: Cluster) -> None:
        host, port = await cluster.first("address")
        await cluster.all("connect", host, port)

    async def memory(self) -> dict[str, float]:
        """Returns resident memory by role, in GiB."""
        totals = {}
        for cluster in self.all:
            totals[f"memory/{cluster.role}_gib"] = round(sum(await cluster.all("memory")), 3)
        return totals

    async def model_seconds(self) -> dict[str, float]:
        """Returns the seconds that policy and replicas spent in the model since the last call, mean over workers."""
        spent = {}
        for cluster in (self.policy, self.rollout):
            total = float(np.mean(await cluster.all("model_seconds")))
            # A worker that took another's place counts from 0.
            since = max(total - self._model_seconds.get(cluster.role, 0.0), 0.0)
            spent[f"time/{cluster.role}_model_s"] = round(since, 4)
            self._model_seconds[cluster.role] = total
        return spent

    def release(self) -> None:
        """Ends the workers and gives the devices back."""
        for cluster in self.all:
            cluster.kill()
        self.pool.release()


def _spread(recipe: Recipe) -> dict[str, int]:
    """Returns the devices of one worker of each role that spreads its workers by itself."""
    if not isinstance(recipe, RlRecipe):
        return {}
    models = {model.role: model.parallel.processes for model in recipe.reward_models}
    return {"rollout": recipe.rollout.parallel.processes, **models}


def max_prompt_tokens(recipe: RlRecipe, context: int) -> int:
    """Returns the longest prompt that leaves room for an answer of full length.

    Raises:
        ConfigError: there is none, with the arithmetic.
    """
    budget = recipe.rollout.sampling.max_tokens
    room = context - budget
    if room < 1:
        raise ConfigError(
            f"`rollout.sampling.max_tokens` is {budget}, the model's context {context}: "
            f"{context} - {budget} = {room} tokens are left for the prompt",
            hint=f"lower it, for example `rollout.sampling.max_tokens={context // 2}`",
        )
    wanted = recipe.rollout.max_prompt_tokens or room
    if wanted > room:
        raise ConfigError(
            f"`rollout.max_prompt_tokens` is {wanted}, but context {context} - `rollout.sampling.max_tokens` {budget} "
            f"leaves {room}",
            hint=f"lower one of them, for example `rollout.max_prompt_tokens={room}`",
        )
    return wanted
