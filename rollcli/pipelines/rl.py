"""Reinforcement learning: the one loop, for every algorithm, task and engine.

    sync weights → roll out groups → (reference, critic, old) forward passes → advantages → update

The step below reads like that. Stages are timed and made visible by `staged`; samples live in rollout/scheduler.py,
mathematics in algorithms/, and where things run in pipelines/roles.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any

import numpy as np

from rollcli.cluster.autopsy import Autopsy
from rollcli.cluster.supervisor import Supervisor
from rollcli.config.schema import RlRecipe
from rollcli.data.batch import Batch
from rollcli.data.carriers import Group
from rollcli.data.stream import derive_seed
from rollcli.engines.base import SamplingParams
from rollcli.errors import WorkerDied
from rollcli.pipelines import metrics
from rollcli.pipelines.base import Pipeline
from rollcli.pipelines.evaluate import evaluate_policy
from rollcli.pipelines.origin import Origin, origin_of
from rollcli.pipelines.recorder import Recorder
from rollcli.pipelines.roles import Roles
from rollcli.pipelines.samples import viewer_samples, write_rollouts
from rollcli.rollout.admission import Admission
from rollcli.rollout.groups import GroupRunner
from rollcli.rollout.router import Router
from rollcli.rollout.scheduler import Rules, Scheduler
from rollcli.rollout.tally import Tally
from rollcli.runs.directory import step_name

MEASURE_LIMIT_S = 30.0
SILENCE_S = 60.0
"""Beyond an episode's own limit: time for it to be closed and its report to arrive."""


def staged(name: str) -> Any:
    """Makes a method of the pipeline a stage: timed, shown, and known to whoever wants to stop the run."""

    def decorate(method: Any) -> Any:
        @wraps(method)
        async def wrapper(self: RlPipeline, *arguments: Any) -> Any:
            with self.recorder.timed(name):
                return await method(self, *arguments)

        return wrapper

    return decorate


class RlPipeline(Pipeline):
    """Trains the policy of one recipe."""

    recipe: RlRecipe

    def __init__(self, recipe: RlRecipe, roles: Roles, recorder: Recorder) -> None:
        super().__init__(recipe, roles, recorder)
        self.algorithm = recipe.algorithm
        self.sampling = SamplingParams(**vars(recipe.rollout.sampling))
        self.connect_rollout()

    def connect_rollout(self) -> None:
        """Puts the workers that produce samples in the charge of a supervisor and a scheduler."""
        recipe, roles, recorder, rollout = self.recipe, self.roles, self.recorder, self.recipe.rollout
        recorder.overlapped = rollout.max_staleness > 0
        autopsy = Autopsy(recorder.directory.logs)
        self.supervisor = Supervisor(autopsy, rollout.max_restarts_per_hour, recorder.warning, rollout.worker_timeout_s)
        roles.supervise(self.supervisor)
        router = Router(len(roles.rollout), rollout.max_rows)
        silence_s = rollout.episode_timeout_s + SILENCE_S
        runner = GroupRunner(roles.environments, router, self.supervisor, recorder.progress, silence_s)
        admission = Admission(recipe.prompts_per_step, rollout.max_staleness, rollout.extra_groups, recipe.steps)
        rules = Rules(
            group_size=recipe.group_size,
            max_group_attempts=rollout.max_group_attempts,
            max_failure_share=rollout.max_failure_share,
            keep_group=self.algorithm.keep_group,
            smallest_group=2 if self.algorithm.compares_group() else 1,
            greedy_baseline=self.algorithm.greedy_baseline,
            tasks=recipe.tasks,
        )
        self.scheduler = Scheduler(runner, self.stream, admission, rules)

    async def run(self) -> None:
        """Watches over the workers, which have all started now, and runs the steps."""
        self.supervisor.watch()
        await super().run()

    async def step(self) -> None:
        """One step of the paper's figure 2."""
        await self.sync_weights()
        groups = await self.roll_out()
        batch = Batch.from_groups(groups)
        self.algorithm.prepare(batch)
        await self.forward_passes(batch)
        minibatches = await self.weigh(batch)
        updates = await self.update(minibatches)
        await self.record(groups, batch, updates)

    @staged("sync")
    async def sync_weights(self) -> None:
        """Brings the rollout replicas to the policy's weights; the version is the number of steps behind them."""
        await self.surviving(lambda: self.roles.sync(self.steps_done))
        self.scheduler.serve(self.steps_done)

    @staged("rollout")
    async def roll_out(self) -> list[Group]:
        """Returns the step's groups, sampled and scored."""
        return await self.scheduler.collect(self.sampling)

    @staged("logprobs")
    async def forward_passes(self, batch: Batch) -> None:
        """Adds the columns that take a forward pass of another model, or of the policy before its first update."""
        roles, needs, temperature = self.roles, self.algorithm.needs(), self.sampling.temperature
        await self.take_devices()
        if "reference" in needs:
            columns = await roles.reference_model.columns("logprobs", batch, temperature, False)
            batch.tokens["reference_logprobs"] = columns
        if "reference_distribution" in needs:
            columns = await roles.reference_model.columns("distribution", batch, temperature, False)
            batch.tokens["reference_distribution"] = columns
        if "critic" in needs:
            batch.tokens["values"] = await roles.critic.columns("values", batch)
        if self.algorithm.old_from_rollout:
            batch.tokens["old_logprobs"] = batch.tokens["rollout_logprobs"]
        elif "old" in needs or self.recipe.minibatches * self.recipe.epochs > 1:
            batch.tokens["old_logprobs"] = await roles.policy.columns("logprobs", batch, temperature)

    @staged("advantages")
    async def weigh(self, batch: Batch) -> list[Batch]:
        """Adds advantages, and splits the batch into minibatches in which every token knows its share of the loss."""
        batch.tokens["advantages"] = self.algorithm.advantages(batch)
        if self.roles.critic is not None:
            batch.tokens["returns"] = self.algorithm.returns(batch)
        trained = batch.select(np.flatnonzero(batch.trained_lengths))
        minibatches: list[Batch] = []
        for epoch in range(self.recipe.epochs):
            seed = derive_seed(self.recipe.seed, "minibatches", self.steps_done, epoch)
            minibatches += trained.minibatches(self.recipe.minibatches, seed)
        if minibatches and not self.algorithm.old_from_rollout:
            # The first update starts from the old policy itself: the engine's own values make its ratio exactly 1.
            minibatches[0].tokens.pop("old_logprobs", None)
        for minibatch in minibatches:
            minibatch.tokens["loss_weights"] = self.algorithm.loss_weights(minibatch)
        return minibatches

    @staged("update")
    async def update(self, minibatches: list[Batch]) -> dict[str, float]:
        """Takes one optimizer step per minibatch, on the critic and on the policy; returns what they measured."""
        measured: dict[str, float] = {}
        if self.roles.critic is not None:
            updates = await self.train(self.roles.critic, minibatches, self.sampling.temperature)
            measured |= {f"critic/{name}": value for name, value in metrics.of_updates(updates).items()}
            measured |= metrics.of_critic(Batch.joined(minibatches[: len(minibatches) // self.recipe.epochs]))
        if self.roles.critic is None or self.steps_done >= self.recipe.critic.warmup_steps:
            updates = await self.train(self.roles.policy, minibatches, self.sampling.temperature)
            measured |= metrics.of_updates(updates)
        # The first minibatch was scored by the policy before any update, the others when old log-probabilities were.
        first_pass = len(minibatches) // self.recipe.epochs
        known = minibatches[: 1 if self.algorithm.old_from_rollout else first_pass]
        measured |= metrics.of_gap(known, self.steps_done, getattr(self.algorithm, "correction", None))
        measured |= metrics.of_reference(known)
        self.algorithm.observe(measured, sum(map(len, minibatches)) // self.recipe.epochs)
        return measured

    @cached_property
    def origin(self) -> Origin:
        """What the run's rollouts are of; a large tokenizer's digest is taken once, not at every step."""
        return origin_of(self.recipe.model, 0)

    async def record(self, groups: list[Group], batch: Batch, updates: dict[str, float]) -> None:
        """Writes the step's samples and metrics."""
        step = self.steps_done + 1
        origin = replace(self.origin, policy_version=self.steps_done)
        write_rollouts(self.recorder.directory.rollouts / f"{step_name(step)}.parquet", step, groups, batch, origin)
        measured = {
            **metrics.of_rollout(groups, self.steps_done),
            **self.scheduler.metrics(),
            **updates,
            "workers_replaced": float(self.supervisor.replaced),
            "sync_mib": self.roles.weights.bytes / 2**20,
            **await self.measured(self.roles.memory),
            **await self.measured(self.roles.model_seconds),
        }
        self.recorder.end_step(measured, viewer_samples(groups, batch))

    async def take_devices(self) -> None:
        """Has the trainers take back the devices that they share with the replicas."""
        await self.surviving(self.roles.training_turn)

    async def surviving(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Makes a call again, after a worker that ended in it has a successor."""
        while True:
            seen = self.supervisor.snapshot()
            try:
                return await call()
            except WorkerDied as error:
                await self.supervisor.replace(error, seen)

    async def measured(self, call: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, float]:
        """Returns what workers say of themselves; nothing, where one of them is too busy to answer soon."""
        try:
            return await asyncio.wait_for(self.surviving(call), MEASURE_LIMIT_S)
        except TimeoutError:
            return {}

    def position(self) -> dict[str, Any]:
        """The scheduler's: draws that wait to be trained belong to it."""
        return self.scheduler.state()

    def go_to(self, position: dict[str, Any]) -> None:
        """Hands a position to the scheduler."""
        self.scheduler.restore(position, self.steps_done)

    async def close(self) -> None:
        """Ends sampling for later steps, and the watch over workers."""
        await self.supervisor.close()
        await self.scheduler.abandon()

    def evaluation_due(self) -> bool:
        """At the start, every so many steps, and at the end."""
        config, step = self.recipe.evaluation, self.steps_done
        at = config.at_start if step == 0 else step == self.recipe.steps or (config.every and step % config.every == 0)
        return bool(at) and self.evaluated_step != step

    @staged("evaluate")
    async def evaluate(self) -> None:
        """Measures the policy on held-out problems."""
        await self.surviving(lambda: self.roles.sync(self.steps_done))
        self.scheduler.serve(self.steps_done)
        result = await evaluate_policy(self.scheduler.runner, self.recipe)
        tally = Tally()
        for group in result.groups:
            for episode in group.by_episode():
                tally.take(episode)
        tally.check_failures(self.recipe.rollout.max_failure_share, tally.failures.total(), tally.episodes)
        path = self.recorder.directory.evals / step_name(self.steps_done)
        result.write(path, self.steps_done)
        if self.steps_done == 0:
            self.accuracies["start"] = result.accuracy
        self.accuracies["end"] = result.accuracy
        self.recorder.evaluation(self.steps_done, result.tasks, result.accuracy)
