"""Supervised fine-tuning through the same training engine: one optimizer step on a batch of demonstrations per step."""

from __future__ import annotations

from rollcli.config.schema import SftRecipe
from rollcli.data.batch import Batch
from rollcli.pipelines import metrics
from rollcli.pipelines.base import Pipeline


class SftPipeline(Pipeline):
    """Trains on the tasks' demonstrations."""

    recipe: SftRecipe

    async def step(self) -> None:
        """Draws demonstrations, has them tokenized by the policy's own template, takes one step."""
        tasks = [self.stream.draw() for _ in range(self.recipe.sequences_per_step)]
        with self.recorder.timed("tokenize"):
            batch: Batch = await self.roles.policy.first("demonstrations", tasks)
        batch.tokens["loss_weights"] = self.recipe.algorithm.loss_weights(batch)
        with self.recorder.timed("update"):
            updates = await self.train(self.roles.policy, [batch], temperature=1.0)
        self.recorder.end_step(metrics.of_updates(updates), [])
