"""The loop around the step: stopping at a safe point, checkpoints that fail, going on from one."""

from __future__ import annotations

import asyncio
import json

import pytest

from rollcli.errors import CheckpointError, EngineError
from rollcli.pipelines.base import INTERRUPTIBLE
from rollcli.pipelines.rl import RlPipeline
from tests.pipelines.doubles import Stage, half_right, run


def make(tmp_path, *overrides, name="run", **options) -> tuple[Stage, RlPipeline]:
    made = Stage(tmp_path / name, *overrides, **options)
    return made, RlPipeline(made.recipe, made.roles, made.recorder)


def drawn(cursor: dict) -> int:
    assert cursor["pending"] == []
    return cursor["stream"]["sums"]["drawn"]


async def stop_when(made: Stage, pipeline: RlPipeline, step: int, stage: str, kill: bool = False) -> int | None:
    """Runs the pipeline and stops it inside a stage of a step; returns the step it promises to save."""
    work = asyncio.create_task(pipeline.run())
    promised = None
    while not work.done():
        if promised is None and (made.recorder.step, made.recorder.stage) == (step, stage):
            promised = pipeline.stop()
            if kill:
                pipeline.killed = True
                work.cancel()
        await asyncio.sleep(0)
    await work
    return promised


async def a_while(*_):
    """What takes a few turns of the loop, so that a stage can be met."""
    for _ in range(10):
        await asyncio.sleep(0)


def hang_at(step_index: int):
    def play(order):
        return None if order.task.split == "train" and order.task.index >= step_index else half_right(order)

    return play


def test_a_whole_run_ends_with_one_checkpoint_of_its_last_step(tmp_path):
    made, pipeline = make(tmp_path, "checkpoints.every=1", "checkpoints.keep_last=2")
    run(pipeline.run())
    assert made.checkpoints() == ["step_000002", "step_000003"] and pipeline.finished
    assert [event["step"] for event in made.events("checkpoint")] == [1, 2, 3]
    state = json.loads((made.directory.checkpoints / "step_000003" / "state.json").read_text())
    assert state["step"] == 3 and drawn(state["cursor"]) == 6


def test_stop_while_sampling_saves_the_last_whole_step_and_its_cursor(tmp_path):
    # Step 2 draws 2 and 3, which never end.
    made, pipeline = make(tmp_path, play=hang_at(2))
    assert run(stop_when(made, pipeline, 2, "rollout")) == 1
    assert (pipeline.steps_done, made.checkpoints()) == (1, ["step_000001"])
    assert pipeline.stream.state() != pipeline.cursor and drawn(pipeline.cursor) == 2
    assert not made.environments.workers[0].running and not pipeline.finished
    state = json.loads((made.directory.checkpoints / "step_000001" / "state.json").read_text())
    assert drawn(state["cursor"]) == 2


@pytest.mark.parametrize(("role", "method", "stage"), [
    ("rollout", "load_weights", "sync"), ("policy", "logprobs", "logprobs"),
])  # fmt: skip
def test_stop_in_other_stages_that_lose_nothing_is_at_once(tmp_path, role, method, stage):
    made, pipeline = make(tmp_path, "evaluation.at_start=false")
    getattr(made, role).during[method] = a_while
    assert stage in INTERRUPTIBLE
    assert run(stop_when(made, pipeline, 2, stage)) == 1
    assert (pipeline.steps_done, made.checkpoints(), made.asked.count("policy.update")) == (1, ["step_000001"], 1)


@pytest.mark.parametrize("stage", ["update", "checkpoint"])
def test_stop_in_a_stage_that_changes_the_policy_waits_for_its_end(tmp_path, stage):
    made, pipeline = make(tmp_path, "checkpoints.every=1", "evaluation.at_start=false")
    made.policy.during["update"] = made.policy.during["save"] = a_while
    promised = run(stop_when(made, pipeline, 2, stage))
    assert promised == pipeline.steps_done == 2
    assert made.checkpoints()[-1] == "step_000002" and made.asked.count("policy.update") == 2
    assert len(made.events("step")) == 2 and drawn(pipeline.cursor) == 4


def test_stop_in_the_first_evaluation_saves_step_0(tmp_path):
    made, pipeline = make(tmp_path, play=lambda order: None)
    assert run(stop_when(made, pipeline, 0, "evaluate")) == 0
    assert made.checkpoints() == ["step_000000"] and pipeline.accuracies == {}


def test_an_evaluation_that_was_cut_off_is_still_due_after_a_resume(tmp_path):
    def play(order):
        return None if order.task.split == "test" else half_right(order)

    made, pipeline = make(tmp_path, "steps=1", "evaluation.at_start=false", play=play)
    assert run(stop_when(made, pipeline, 1, "evaluate")) == 1
    assert pipeline.steps_done == 1 and not pipeline.finished
    again, resumed = make(tmp_path, "steps=1", "evaluation.at_start=false", name="again")

    async def go_on() -> None:
        await resumed.restore(made.directory.checkpoints / "step_000001")
        await resumed.run()

    run(go_on())
    assert resumed.finished and [event["step"] for event in again.events("evaluation")] == [1]


def test_kill_writes_nothing(tmp_path):
    made, pipeline = make(tmp_path, play=hang_at(2))
    with pytest.raises(asyncio.CancelledError):
        run(stop_when(made, pipeline, 2, "rollout", kill=True))
    assert made.checkpoints() == []


def test_kill_in_a_checkpoint_leaves_the_one_before(tmp_path):
    made, pipeline = make(tmp_path, "checkpoints.every=1", "evaluation.at_start=false")

    async def slow(*_):
        if made.recorder.step == 2:
            await asyncio.Event().wait()

    made.policy.during["save"] = slow
    with pytest.raises(asyncio.CancelledError):
        run(stop_when(made, pipeline, 2, "checkpoint", kill=True))
    assert made.checkpoints() == ["step_000001"]


def test_a_periodic_checkpoint_that_cannot_be_written_is_a_warning(tmp_path):
    made, pipeline = make(tmp_path, "checkpoints.every=1")
    made.policy.failing["save"] = OSError(28, "No space left on device")
    run(pipeline.run())
    assert made.checkpoints() == ["step_000002", "step_000003"]
    (warning,) = made.events("warning")
    assert "checkpoint of step 1 cannot be written" in warning["message"] and "no space left" in warning["message"]
    assert made.recorder.status.status.state == "running"


def test_the_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path):
    made, pipeline = make(tmp_path, "checkpoints.every=2")

    async def full(*_):
        if made.recorder.step == 3:
            raise OSError(28, "No space left on device")

    made.policy.during["save"] = full
    with pytest.raises(CheckpointError, match="step 3 cannot be written"):
        run(pipeline.run())
    assert made.checkpoints() == ["step_000002"]


def test_an_error_in_a_step_ends_the_run_without_a_checkpoint_of_it(tmp_path):
    made, pipeline = make(tmp_path, "checkpoints.every=1")

    async def fail(*_):
        if made.recorder.step == 2:
            raise EngineError("no memory")

    made.policy.during["update"] = fail
    with pytest.raises(EngineError, match="no memory"):
        run(pipeline.run())
    assert made.checkpoints() == ["step_000001"]


def test_foreign_cancellation_is_not_taken_for_a_stop(tmp_path):
    made, pipeline = make(tmp_path, play=hang_at(0), name="run")

    async def main() -> None:
        work = asyncio.create_task(pipeline.run())
        while made.recorder.stage != "rollout":
            await asyncio.sleep(0)
        work.cancel()
        await work

    with pytest.raises(asyncio.CancelledError):
        run(main())
    assert made.checkpoints() == []


def test_going_on_draws_what_an_undisturbed_run_draws(tmp_path):
    whole, pipeline = make(tmp_path, "steps=4", name="whole")
    run(pipeline.run())
    first, stopped = make(tmp_path, "steps=4", name="first", play=hang_at(4))
    run(stop_when(first, stopped, 3, "rollout"))
    second, resumed = make(tmp_path, "steps=4", name="second")

    async def go_on() -> None:
        await resumed.restore(first.directory.checkpoints / "step_000002")
        await resumed.run()

    run(go_on())
    assert second.policy.arguments["load"] == [(str((first.directory.checkpoints / "step_000002").resolve()),)]

    def trained(made: Stage) -> list[tuple[int, int]]:
        seen = [(o.task.index, o.task.seed) for o in made.environments.orders if o.task.split == "train"]
        return list(dict.fromkeys(seen))

    assert trained(whole) == list(dict.fromkeys(trained(first)[:4] + trained(second)))
    assert [index for index, _ in trained(second)] == [4, 5, 6, 7]
    versions = [version for _, version in second.rollout.arguments["load_weights"]]
    assert versions == [2, 3, 4]


CRITIC = ("algorithm={name: ppo, kl: {coefficient: 0}}", "evaluation.at_start=false")


def test_the_critic_is_saved_and_restored_in_a_folder_of_its_own(tmp_path):
    made, pipeline = make(tmp_path, *CRITIC, "steps=1")
    run(pipeline.run())
    path = (made.directory.checkpoints / "step_000001").resolve()
    assert ((path / "weights").read_text(), (path / "critic" / "weights").read_text()) == ("policy", "critic")
    again, resumed = make(tmp_path, *CRITIC, name="again")
    run(resumed.restore(path))
    assert again.policy.arguments["load"] == [(str(path),)]
    assert again.critic.arguments["load"] == [(str(path / "critic"),)]
    without, _ = make(tmp_path, "steps=1", name="without")
    run(RlPipeline(without.recipe, without.roles, without.recorder).run())
    assert not (without.directory.checkpoints / "step_000001" / "critic").exists()


RUNNING = ("algorithm.shaping.mean=running", "evaluation.at_start=false")


def saved_count(made: Stage, step: int) -> float:
    state = json.loads((made.directory.checkpoints / f"step_{step:06d}" / "state.json").read_text())
    return state["algorithm"]["shaping"]["count"]


def test_a_stop_in_the_middle_of_a_step_saves_the_algorithm_as_it_was_before(tmp_path):
    made, pipeline = make(tmp_path, *RUNNING)
    made.policy.during["logprobs"] = a_while
    assert run(stop_when(made, pipeline, 2, "logprobs")) == 1
    # The second step's rewards have been seen by then, and are not part of what is saved.
    assert pipeline.algorithm.state()["shaping"]["count"] == 16 and saved_count(made, 1) == 8
    again, resumed = make(tmp_path, *RUNNING, name="again")

    async def go_on() -> None:
        await resumed.restore(made.directory.checkpoints / "step_000001")
        assert resumed.algorithm.state()["shaping"]["count"] == 8
        await resumed.run()

    run(go_on())
    assert saved_count(again, 3) == 24


def test_workers_are_told_the_algorithms_state_of_the_step(tmp_path):
    made, pipeline = make(tmp_path, *RUNNING, policies=2)
    run(pipeline.run())
    told = [
        (step, state["shaping"]["count"])
        for (arguments,) in made.policy.arguments["update"]
        for _, step, state, _ in arguments
    ]
    assert told == [(0, 8), (0, 8), (1, 16), (1, 16), (2, 24), (2, 24)]


def test_restoring_other_data_is_refused(tmp_path):
    made, pipeline = make(tmp_path, "steps=1")
    run(pipeline.run())
    path = made.directory.checkpoints / "step_000001"
    state = json.loads((path / "state.json").read_text())
    state["cursor"]["stream"]["sums"]["fingerprint"] = "other"
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="other data"):
        run(make(tmp_path, name="again")[1].restore(path))
