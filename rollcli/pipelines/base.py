"""What every pipeline has: the loop over steps, checkpoints, evaluation when due, and stopping at a safe point."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from rollcli.checkpoints import store
from rollcli.cluster.cluster import Cluster
from rollcli.config.schema import Recipe
from rollcli.data.batch import Batch
from rollcli.data.stream import TaskStream
from rollcli.errors import CheckpointError
from rollcli.pipelines.recorder import Recorder
from rollcli.pipelines.roles import Roles
from rollcli.runs.directory import step_name

INTERRUPTIBLE = ("sync", "rollout", "logprobs", "evaluate")
"""Stages that leave the trained state as it was: a stop abandons them instead of waiting for their end."""


class Pipeline:
    """A run of `recipe.steps` steps, from wherever `restore` put it."""

    def __init__(self, recipe: Recipe, roles: Roles, recorder: Recorder) -> None:
        self.recipe = recipe
        self.roles = roles
        self.recorder = recorder
        self.steps_done = 0
        self.saved_step: int | None = None
        self.evaluated_step: int | None = None
        self.accuracies: dict[str, float] = {}
        self.stream = TaskStream(recipe.tasks, recipe.seed)
        self.cursor: dict[str, Any] = {}
        self.algorithm_state = recipe.algorithm.state()
        self.killed = False
        self._stopping = False
        self._running: asyncio.Task | None = None

    async def run(self) -> None:
        """Runs all remaining steps; returns early when told to stop. Ends with a checkpoint in either case."""
        self._running = asyncio.current_task()
        self.cursor = self.position()
        try:
            await self.evaluate_if_due()
            while self.steps_done < self.recipe.steps and not self._stopping:
                self.recorder.begin_step(self.steps_done + 1)
                await self.step()
                self.steps_done += 1
                self.cursor = self.position()
                self.algorithm_state = self.recipe.algorithm.state()
                await self.evaluate_if_due()
                await self.checkpoint_if_due()
        except asyncio.CancelledError:
            if not self._stopping or self.killed:
                raise
            self._running.uncancel()
        await self.checkpoint()

    async def step(self) -> None:
        """One step."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends what goes on between steps."""

    def position(self) -> dict[str, Any]:
        """Returns where the pipeline is in its tasks."""
        return self.stream.state()

    def go_to(self, position: dict[str, Any]) -> None:
        """Goes on from a position.

        Raises:
            CheckpointError: the data is not the checkpoint's.
        """
        self.stream.restore(position)

    async def evaluate_if_due(self) -> None:
        """Evaluates where the recipe wants it, unless that is done or the run is to stop."""
        if self.evaluation_due() and not self._stopping:
            await self.evaluate()
            self.evaluated_step = self.steps_done

    def evaluation_due(self) -> bool:
        """Whether the policy as it is now has yet to be evaluated; never, in pipelines that cannot."""
        return False

    async def evaluate(self) -> None:
        """Evaluates the policy."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.steps_done >= self.recipe.steps and not self.evaluation_due()

    def stop(self) -> int:
        """Asks the run to stop: at once where nothing is lost by it, else after the step that is being trained.

        Returns the step whose checkpoint the run will end with.
        """
        self._stopping = True
        if self._running is not None and self.recorder.stage in INTERRUPTIBLE:
            self._running.cancel()
            return self.steps_done
        return self.steps_done + (self.recorder.step > self.steps_done)

    async def checkpoint_if_due(self) -> None:
        """Writes a periodic checkpoint; one that cannot be written is a warning, the next may succeed."""
        if self.steps_done % self.recipe.checkpoints.every or self.steps_done == self.recipe.steps:
            return
        try:
            await self.checkpoint()
        except CheckpointError as error:
            self.recorder.warning(f"{error}; {error.hint}")

    async def checkpoint(self) -> None:
        """Writes a checkpoint of the state after `steps_done` steps, unless there is one.

        Raises:
            CheckpointError: it cannot be written; nothing else is touched.
        """
        if self.saved_step == self.steps_done:
            return
        folder = self.recorder.directory.checkpoints
        started = time.monotonic()
        with self.recorder.timed("checkpoint"), store.writing(folder, self.steps_done, self.state()) as beside:
            # After an evaluation the trainers may have left their devices to the replicas.
            await self.take_devices()
            await self.roles.policy.all("save", str(beside.resolve()))
            if self.roles.critic is not None:
                await self.roles.critic.all("save", str((beside / "critic").resolve()))
        self.saved_step = self.steps_done
        path = folder / step_name(self.steps_done)
        self.recorder.checkpoint(self.steps_done, path, time.monotonic() - started)
        for warning in store.prune(folder, self.recipe.checkpoints.keep_last, self.recipe.checkpoints.keep_every):
            self.recorder.warning(warning)

    async def take_devices(self) -> None:
        """Has the trainers take back devices that they left to others."""

    async def train(self, cluster: Cluster, minibatches: list[Batch], temperature: float) -> list[dict[str, float]]:
        """Has every worker take one optimizer step per minibatch, each on its shard.

        Adds a column `updated_<role>`, what each pass computed before its update, and returns the metrics of each.
        """
        shards = [part.shards(cluster.data_ranks) for part in minibatches]
        state = self.recipe.algorithm.state()
        per_worker = [
            ([part.select(mine[rank]) for part, mine in zip(minibatches, shards, strict=True)],
             self.steps_done, state, temperature)
            for rank in range(cluster.data_ranks)
        ]  # fmt: skip
        results = await cluster.each("update", per_worker)
        for number, (part, mine) in enumerate(zip(minibatches, shards, strict=True)):
            part.tokens[f"updated_{cluster.role}"] = part.gather(mine, [result[number][1] for result in results])
        return [metrics for metrics, _ in results[0]]

    def state(self) -> dict[str, Any]:
        """Returns what a resume needs beside the policy's own state."""
        return {
            "step": self.steps_done,
            "cursor": self.cursor,
            "evaluated_step": self.evaluated_step,
            "accuracies": self.accuracies,
            "algorithm": self.algorithm_state,
        }

    async def restore(self, path: Path) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointError: the data is not the checkpoint's.
        """
        state = store.read_state(path)
        self.steps_done = self.saved_step = state["step"]
        self.go_to(state["cursor"])
        self.evaluated_step = state["evaluated_step"]
        self.accuracies = state["accuracies"]
        self.algorithm_state = state["algorithm"]
        self.recipe.algorithm.restore(self.algorithm_state)
        await self.roles.policy.all("load", str(path.resolve()))
        if self.roles.critic is not None:
            await self.roles.critic.all("load", str((path / "critic").resolve()))
