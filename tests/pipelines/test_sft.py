"""Supervised steps with a double for the policy."""

from __future__ import annotations

from rollcli.pipelines.sft import SftPipeline
from rollcli.runs.events import read_lines
from tests.pipelines.doubles import Stage, run

SMALL = ("steps=3", "sequences_per_step=5", "checkpoints.every=2")


def test_each_step_draws_tokenizes_updates_and_is_written(tmp_path):
    made = Stage(tmp_path / "run", *SMALL, name="sft-tiny", policies=2)
    pipeline = SftPipeline(made.recipe, made.roles, made.recorder)
    run(pipeline.run())
    per_step = ["policy.demonstrations", "policy.update"]
    assert made.asked == [*per_step, *per_step, "policy.save", *per_step, "policy.save"]
    drawn = [task.index for (tasks,) in made.policy.arguments["demonstrations"] for task in tasks]
    assert drawn == list(range(15))
    assert all("response" in task.payload for (tasks,) in made.policy.arguments["demonstrations"] for task in tasks)
    assert [event["stage"] for event in made.events("stage_started")][:2] == ["tokenize", "update"]
    assert [(row["step"], row["loss"]) for row in read_lines(made.directory.metrics)] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert made.events("evaluation") == [] and made.checkpoints() == ["step_000002", "step_000003"]


def test_every_demonstration_is_in_one_shard_and_weights_add_up(tmp_path):
    made = Stage(tmp_path / "run", *SMALL, name="sft-tiny", policies=2)
    run(SftPipeline(made.recipe, made.roles, made.recorder).run())
    for (arguments,) in made.policy.arguments["update"]:
        shards = [part for parts, _, _, temperature in arguments for part in parts if temperature == 1.0]
        assert sum(len(shard) for shard in shards) == 5 and all(len(shard) for shard in shards)
        # Token mean: each of the trained tokens has an equal share, and all shares together are 1.
        weights = [w for shard in shards for w in shard.tokens["loss_weights"][shard.tokens["loss_mask"]]]
        assert abs(sum(weights) - 1) < 1e-6 and max(weights) - min(weights) < 1e-9
